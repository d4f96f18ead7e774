from __future__ import annotations

import base64
import gzip
import io
import json
import struct
import tarfile
import zipfile

import numpy as np
import pytest

from fedloom import archives
from fedloom.data import images, labelled, sentences
from fedloom.data.labelled import load_labelled
from fedloom.errors import Refusal

from fetched import skip_without


def test_digits_are_all_there():
    data = load_labelled("packaged:digits")
    assert (len(data), data.items.shape, data.items.dtype) == (1797, (1797, 8, 8), np.uint8)
    assert data.classes == tuple("0123456789")
    assert data.items.max() == 255
    assert len(set(data.rows())) == 1797


def test_a_row_is_named_by_content_and_label():
    items = ("a", "a", "b", "a")
    data = labelled.Labelled(items, np.array([0, 1, 0, 0]), ("no", "yes"))
    first, other_label, other_text, again = data.rows()
    assert first == again
    assert len({first, other_label, other_text}) == 3
    assert all(len(row) == 16 for row in data.rows())


def test_no_two_rows_share_a_name_whatever_is_in_them():
    """Marks between the parts are in texts and labels, too, and so are brackets and quotes."""
    odd = [("a|b", "c"), ("a", "b|c"), ('a", "b', "c"), ("a", 'b", "c'), ("", "a|b|c"), ("ä", "c")]
    names = [labelled._row(*row) for row in odd]
    assert len(set(names)) == len(odd)
    pixels = np.frombuffer(b"|1||", np.uint8)
    pictures = [(pixels[:2], "||1"), (pixels, "1"), (pixels.reshape(2, 2), "1"), (pixels[:0], "1")]
    assert len({labelled._row(*row) for row in pictures}) == len(pictures)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_tables_of_one_s_own(tmp_path, ending):
    rows = [("It rained.", "wet", "x"), ("It shone.", "dry", "y"), ("It poured.", "wet", "y")]
    path = tmp_path / f"weather.{ending}"
    if ending == "csv":
        path.write_text("text,label,owner\n" + "".join(",".join(r) + "\n" for r in rows))
    else:
        names = ("text", "label", "owner")
        path.write_text("".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in rows))
    data = load_labelled(f"path:{path}")
    assert data.items == tuple(text for text, _, _ in rows)
    assert [data.classes[i] for i in data.labels] == ["wet", "dry", "wet"]
    assert data.classes == ("dry", "wet")
    assert data.owners == ("x", "y", "y")
    assert data.test is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("text,label\nIt rained.,\n", "expected a text and a label"),
        ("words,label\nIt rained.,wet\n", "expected a text and a label"),
        ("text,label\nIt rained.,wet\n", "has 1 classes"),
    ],
)
def test_tables_without_what_is_needed_are_refused(tmp_path, text, said):
    path = tmp_path / "weather.csv"
    path.write_text(text)
    with pytest.raises(Refusal, match=said) as refused:
        load_labelled(f"path:{path}")
    assert "rained" not in str(refused.value)  # a refusal may travel


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(Refusal, match="did you mean packaged:uci-sentences"):
        load_labelled("packaged:uci-sentence")
    with pytest.raises(Refusal, match="expected path:FILE or one of"):
        load_labelled("imdb")


def test_sentences_out_of_npm_s_package(tmp_path):
    path = tmp_path / "sentiment.tgz"
    with tarfile.open(path, "w:gz") as members:
        for i, shop in enumerate(sentences.SHOPS):
            rows = [{"text": f" Good {shop}. ", "class": 1}, {"text": "Bad.", "class": i % 2}, {}]
            data = json.dumps(rows).encode()
            member = tarfile.TarInfo(f"package/test/fixtures/{shop}.json")
            member.size = len(data)
            members.addfile(member, io.BytesIO(data))
    assert list(sentences.uci(path)) == [
        ("amazon", "Good amazon.", 1),
        ("amazon", "Bad.", 0),
        ("imdb", "Good imdb.", 1),
        ("imdb", "Bad.", 1),
        ("yelp", "Good yelp.", 1),
        ("yelp", "Bad.", 0),
    ]
    path.write_bytes(b"no archive")
    with pytest.raises(Refusal, match="does not hold its texts"):
        list(sentences.uci(path))


def test_orange_s_tables_name_their_columns(tmp_path):
    path = tmp_path / "orange.whl"
    table = f"Category\tText\nd\tstring\nclass\t\n\nrec.autos\t{'car ' * 40000}\n"
    with zipfile.ZipFile(path, "w") as members:
        members.writestr("orangecontrib/text/datasets/few.tab", table)
    ((label, text),) = sentences.orange(path, "few")
    assert (label, len(text)) == ("rec.autos", 160000)  # longer than csv reads by itself
    with pytest.raises(Refusal, match="delete it"):
        list(sentences.orange(path, "none"))


def _idx(array):
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(head + array.tobytes())


def test_fashion_mnist_out_of_a_debian_package(tmp_path):
    random = np.random.default_rng(0)
    sizes = {"train": 5, "t10k": 3}
    pictures = {k: random.integers(256, size=(n, 28, 28), dtype=np.uint8) for k, n in sizes.items()}
    labels = {k: random.integers(10, size=n, dtype=np.uint8) for k, n in sizes.items()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tree:
        for part in sizes:
            for kind, array in (("images-idx3", pictures[part]), ("labels-idx1", labels[part])):
                data = _idx(array)
                name = f"./usr/share/datasets/fashion-mnist/{part}-{kind}-ubyte.gz"
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tree.addfile(member, io.BytesIO(data))
    body = packed.getvalue()
    header = f"{'data.tar.xz':<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n"
    path = tmp_path / "fashion.deb"
    path.write_bytes(b"!<arch>\n" + header.encode() + body)
    came, of, test = images.fashion_mnist(path)
    assert np.array_equal(came, np.concatenate([pictures["train"], pictures["t10k"]]))
    assert np.array_equal(of, np.concatenate([labels["train"], labels["t10k"]]))
    assert test.tolist() == [False] * 5 + [True] * 3
    path.write_bytes(b"!<arch>\n" + header.replace("data", "nope").encode() + body)
    with pytest.raises(Refusal, match="does not hold Fashion-MNIST"):
        images.fashion_mnist(path)


def test_cifar_is_decoded_from_png():
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    pictures = random.integers(256, size=(2, 32, 32, 3), dtype=np.uint8)
    examples = []
    for picture, right in zip(pictures, ("dog", "airplane"), strict=True):
        file = io.BytesIO()
        image.fromarray(picture).save(file, "PNG")
        scores = {name: int(name == right) for name in reversed(images.CIFAR10)}
        text = base64.b64encode(file.getvalue()).decode()
        examples.append({"input": text, "target_scores": scores})
    came, labels = images.decode_task(examples)
    assert np.array_equal(came, pictures)
    assert labels.tolist() == [5, 0]


@pytest.mark.parametrize(
    "archive",
    [
        archives.SENTIMENT,
        archives.ORANGE_TEXT,
        archives.FASHION,
        archives.MINILM,
        archives.EFFICIENTNET,
    ],
)
def test_archives_are_pinned(archive):
    assert archive.version in archive.filename
    assert archive.filename.startswith(archive.project.replace("-", "_").split("_")[0])
    assert len(archive.sha256) == 64


def test_npm_is_asked_for_a_version():
    assert archives.SENTIMENT.requirement == "sentiment@5.0.2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "rows", "classes", "test"),
    [
        ("packaged:uci-sentences", 3000, 2, None),
        ("packaged:newsgroups", 18821, 20, 7528),
        ("packaged:fashion-mnist", 70000, 10, 10000),
        ("packaged:cifar10", 10000, 10, None),
    ],
)
def test_packaged_sets_are_what_their_archives_say(source, rows, classes, test):
    skip_without(source)
    data = load_labelled(source)
    assert (len(data), len(data.items), len(data.classes)) == (rows, rows, classes)
    assert (None if data.test is None else int(data.test.sum())) == test
    assert set(data.labels) == set(range(classes))
    if source == "packaged:uci-sentences":
        assert {shop: data.owners.count(shop) for shop in sentences.SHOPS} == dict.fromkeys(
            sentences.SHOPS, 1000
        )
        assert int(data.labels.sum()) == 1500

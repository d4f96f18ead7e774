import bz2
import gzip
import io
import struct
import tarfile
import zipfile
import zlib

import pytest

from fedloom import archives
from fedloom.data import novels, wikitext
from fedloom.data.text import PASSAGE, is_prose, load_text, passages, sentences
from fedloom.errors import Refusal


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("It rained. We left.", ["It rained.", "We left."]),
        ("Dr. A. B. Cole of the U.S. Army came. He sat.", None),
        ('"Why?" she asked. "Go!" He went.', ['"Why?" she asked.', '"Go!"', "He went."]),
        ("It cost 3.5 pounds, e.g. Much more.", ["It cost 3.5 pounds, e.g. Much more."]),
        ("A line\nthat goes on. Then\n\nA heading\n\nMore.", None),
        ("", []),
    ],
)
def test_sentences_end_at_full_stops_but_not_after_abbreviations(text, cut):
    wanted = {
        "Dr": ["Dr. A. B. Cole of the U.S. Army came.", "He sat."],
        "A ": ["A line that goes on.", "Then", "A heading", "More."],
    }
    assert list(sentences(text)) == (cut if cut is not None else wanted[text[:2]])


@pytest.mark.parametrize(
    "kept",
    [
        "The river ran to the sea.",
        '"We are here," said the captain.',
        "In 1901 it was (almost) new.",
    ],
)
def test_whole_sentences_are_prose(kept):
    assert is_prose(kept)


@pytest.mark.parametrize(
    "dropped",
    [
        "the river ran to the sea.",
        "History of the river and the sea",
        "The river of  length ran to the sea.",
        "The river ( ; ) ran to the sea.",
        "The river , which ran to the sea.",
        "The [river] ran to the sea.",
        "Too short a one.",
        f"The {'very ' * 90}long river ran.",
    ],
)
def test_fragments_and_holes_are_not(dropped):
    assert not is_prose(dropped)


def test_markup_becomes_plain_text():
    markup = (
        "{{Infobox|a={{b|c}}}}\n'''Iron''' is a [[chemical element|metal]]<ref name=x/> with"
        " ''many'' [[use]]s.<ref>{{cite|t}}</ref> It melts at {{convert|1538|C}}, says"
        " [http://x.org a page].<!-- no -->\n[[File:x.jpg|thumb|A [[bar]]]]\n== Uses ==\n* a list\n"
        "{| class=x\n| cell\n|}\nIt weighs {{unknown|7}} grams a litre &amp; more.\n[[de:Eisen]]"
    )
    said = [line for line in wikitext.plain(markup).split("\n\n") if line.strip()]
    assert said == [
        "Iron is a metal with many uses. It melts at 1538 C, says a page.",
        "It weighs  grams a litre & more.",
    ]
    assert not is_prose(said[1])  # the hole shows


def test_released_wikitext_is_closed_up():
    lines = [
        " = Iron = \n",
        " \n",
        " Iron is well @-@ known , and costs 1 @,@ 200 pounds ( 1 @.@ 5 kg ) . \n",
        " = = Uses = = \n",
        ' It \'s " hard " ; very . \n',
        " = Tin = \n",
        " Tin is not . \n",
    ]
    assert list(wikitext.released(lines)) == [
        ("Iron", 'Iron is well-known, and costs 1,200 pounds (1.5 kg).\n\nIt\'s "hard"; very.'),
        ("Tin", "Tin is not."),
    ]


def test_articles_are_read_out_of_the_wheel(tmp_path):
    page = "<page><title>{}</title><text xml:space='preserve'>{}</text></page>"
    dump = page.format("A &amp; B", "Text &lt;b&gt; one.") + page.format("C", "#REDIRECT [[A]]")
    wheel = tmp_path / "gensim.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(wikitext._DUMP, bz2.compress(dump.encode()))
    assert list(wikitext.articles(wheel)) == [("A & B", "Text <b> one.")]


def r_number(*values):
    return struct.pack(f">{len(values)}i", *values)


def r_chars(text):
    return (
        r_number(9 | 0x40000, -1)
        if text is None
        else (r_number(9 | 0x40000, len(text.encode())) + text.encode())
    )


def r_strings(texts):
    return r_number(16, len(texts)) + b"".join(r_chars(text) for text in texts)


def r_names(texts, symbol):
    tag = r_number(1) + r_chars("names") if symbol else r_number(255 | 1 << 8)
    return r_number(2 | 0x400) + tag + r_strings(texts) + r_number(254)


def r_list(named, symbol=True):
    body = b"".join(named.values())
    return r_number(19 | 0x200, len(named)) + body + r_names(list(named), symbol)


def r_object(item, version=3):
    encoding = r_number(5) + b"UTF-8" if version == 3 else b""
    return b"X\n" + r_number(version, 0x40201, 0x30500) + encoding + item


def debian(path, books):
    store, places = b"", {}
    for name, lines in books.items():
        plain = r_object(r_strings(lines))
        packed = len(plain).to_bytes(4, "big") + zlib.compress(plain)
        places[name] = r_number(13, 2, len(store), len(packed))
        store += packed
    index = r_list({"variables": r_list(places), "compressed": r_number(13, 1, 1)}, symbol=False)
    inside = io.BytesIO()
    with tarfile.open(fileobj=inside, mode="w:xz") as tree:
        for end, data in ((".rdx", gzip.compress(r_object(index))), (".rdb", store)):
            member = tarfile.TarInfo(novels._DATA + end)
            member.size = len(data)
            tree.addfile(member, io.BytesIO(data))
    members = {"debian-binary": b"2.0", "data.tar.xz": inside.getvalue()}
    path.write_bytes(
        b"!<arch>\n"
        + b"".join(
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
            + data
            + b"\n" * (len(data) % 2)
            for name, data in members.items()
        )
    )
    return path


def test_novels_are_read_out_of_the_package(tmp_path):
    books = {"sense": ["One é", None, "two"], "emma": ["three"]}
    package = debian(tmp_path / "x.deb", books)
    assert list(novels.austen(package)) == [("emma", "three"), ("sense", "One é\n\ntwo")]


def test_what_is_no_such_package_is_refused(tmp_path):
    package = debian(tmp_path / "x.deb", {"emma": ["three"]})
    whole = package.read_bytes()
    package.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refusal, match="does not hold the novels"):
        list(novels.austen(package))
    (tmp_path / "y.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(Refusal, match="does not hold the novels"):
        list(novels.austen(tmp_path / "y.deb"))


@pytest.mark.parametrize("data", [b"", b"X\n", r_object(r_number(14, 1)), r_object(r_number(9, 9))])
def test_other_serialisations_are_refused(data):
    with pytest.raises((ValueError, struct.error)):
        novels.read_r(data)
    assert novels.read_r(r_object(r_strings(["a"]), version=2)) == ["a"]


def test_without_apt_the_novels_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match=r"this machine has no apt-get; .*fedloom data fetch"):
        archives.fetch(archives.AUSTEN)


def test_local_files_are_documents_in_sorted_order(tmp_path):
    long = " ".join(f"Sentence number {i} is about the sea." for i in range(PASSAGE + 7))
    (tmp_path / "b.md").write_text("# Title\n\nThe river ran to the sea.\n\n- a list of things.\n")
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "c.html").write_text("The river ran to the sea.")
    documents = load_text(f"path:{tmp_path}")
    assert [(d.work, d.part, len(d.sentences)) for d in documents] == [
        ("a", 0, PASSAGE),
        ("a", 1, 7),
        ("b", 0, 1),
    ]
    assert load_text(f"path:{tmp_path / 'b.md'}") == documents[2:]
    assert next(iter(passages("b", "The river ran to the sea.", "test"))).side == "test"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("packaged:wikipdia", "did you mean packaged:wikipedia"),
        ("path:", "expected packaged:wikipedia"),
        ("path:/no/such/folder", "does not exist"),
        ("hub:none/such", "cannot get hub:none/such"),
    ],
)
def test_sources_that_are_not_there_are_refused(source, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(Refusal, match=said):
        load_text(source)


def test_text_without_prose_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("nothing here\n\nor here")
    with pytest.raises(Refusal, match="no sentence"):
        load_text(f"path:{tmp_path}")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refusal, match="UTF-8"):
        load_text(f"path:{tmp_path / 'a.txt'}")


@pytest.mark.slow
def test_packaged_wikipedia_is_what_it_was():
    documents = load_text("packaged:wikipedia")
    kept = [sentence for document in documents for sentence in document.sentences]
    assert len({document.work for document in documents}) > 90
    assert len(kept) > 15_000
    assert not [s for s in kept if any(mark in s for mark in ("{{", "}}", "[[", "]]", "<", "|"))]

"""Frozen encoders: what a key is, one forward pass each, no gradient, what the digest covers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
)

from fedloom.data.labelled import load_labelled
from fedloom.errors import Refusal
from fedloom.models import efficientnet, encoders, image_encoders
from fedloom.models.base import load_base
from fedloom.models.encoders import Pixels, ReluFeatures, load_encoder

from fetched import skip_without

TEXTS = ["amber brook", "cedar dune ember fjord grove", "kelp", "dune amber kelp"]
WORDS = ("amber", "brook", "cedar", "dune", "ember", "fjord", "grove", "kelp", "a", "photo", "of")


def _save_tokenizer(folder):
    vocabulary = {w: i for i, w in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS, "."))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokens = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", model_max_length=16, **tokens
    )
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, request):
    if "slow" not in request.keywords:
        monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bert(tmp_path):
    folder = tmp_path / "bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture
def clip(tmp_path):
    folder = tmp_path / "clip"
    torch.manual_seed(0)
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    text = {"vocab_size": 20, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    config = CLIPConfig(
        text_config=small | text,
        vision_config=small | {"image_size": 16, "patch_size": 8},
        projection_dim=24,
    )
    CLIPModel(config).save_pretrained(folder)
    _save_tokenizer(folder)
    steps = {
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(steps))
    return folder


def pictures(n, height=20, width=24, colours=3):
    shape = (n, height, width, colours) if colours else (n, height, width)
    return np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)


def counted(encoder, items):
    """Encode; return keys, and the items that went through the network, forward passes in all."""
    seen = []

    def hook(module, args, kwargs, output):
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()
        seen.append(len(next(iter((*args, *kwargs.values())))))

    handle = encoder.model.register_forward_hook(hook, with_kwargs=True)
    try:
        return encoder.encode(items), sum(seen)
    finally:
        handle.remove()


def weights_of(encoder):
    return {name: w.detach().clone() for name, w in encoder.model.state_dict().items()}


@pytest.fixture(params=["bert", "clip", "lm", "efficientnet"])
def encoder_and_items(request):
    """One encoder of each kind, with more items than a batch has."""
    if request.param == "lm":
        return load_encoder("lm:tiny:llama"), [f"{t} {i}" for i, t in enumerate(TEXTS * 9)]
    if request.param == "efficientnet":
        torch.manual_seed(0)
        network = efficientnet.EfficientNetLite0()
        encoder = image_encoders.ImageEncoder(
            network, lambda x: (x - 127) / 128, width=1280, digest="random"
        )
        return encoder, pictures(34)
    folder = request.getfixturevalue(request.param)
    items = TEXTS * 9 if request.param == "bert" else pictures(37)
    return load_encoder(f"path:{folder}"), items


def test_each_item_goes_through_the_network_once_without_gradients(encoder_and_items):
    encoder, items = encoder_and_items
    before = weights_of(encoder)
    keys, passes = counted(encoder, items)
    assert passes == len(items)
    assert keys.shape == (len(items), encoder.width)
    assert keys.dtype == np.float32
    assert np.allclose(np.linalg.norm(keys, axis=1), 1, atol=1e-5)
    assert all(torch.equal(before[name], w) for name, w in encoder.model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in encoder.model.parameters())


def test_a_key_does_not_depend_on_the_company(encoder_and_items):
    encoder, items = encoder_and_items
    keys = encoder.encode(items)
    alone = np.concatenate([encoder.encode(items[i : i + 1]) for i in range(4)])
    assert np.allclose(keys[:4], alone, atol=2e-5)
    assert np.allclose(encoder.encode(items[::-1])[::-1], keys, atol=2e-5)


def test_sentence_keys_are_means_over_tokens(bert):
    encoder = load_encoder(f"path:{bert}")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bert)
    tokens = tokenizer(TEXTS, padding=True, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    with torch.no_grad():
        hidden = BertModel.from_pretrained(bert)(**tokens).last_hidden_state
    for i, key in enumerate(encoder.encode(TEXTS)):
        heard = hidden[i][tokens["attention_mask"][i].bool()].mean(0)
        assert np.allclose(key, heard / heard.norm(), atol=1e-5)


def test_sentence_transformers_say_how_they_pool(bert):
    plain = load_encoder(f"path:{bert}")
    (bert / "1_Pooling").mkdir()
    told = bert / "1_Pooling" / "config.json"
    told.write_text(json.dumps({"pooling_mode_cls_token": True, "word_embedding_dimension": 32}))
    encoders._load.cache_clear()
    first = load_encoder(f"path:{bert}")
    assert first.digest != plain.digest
    assert not np.allclose(first.encode(TEXTS), plain.encode(TEXTS), atol=1e-3)
    told.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    encoders._load.cache_clear()
    with pytest.raises(Refusal, match="pools by"):
        load_encoder(f"path:{bert}")


def test_long_texts_are_cut_to_what_the_model_has_places_for(bert):
    encoder = load_encoder(f"path:{bert}")
    long = " ".join(["amber", "brook"] * 40)
    assert np.isfinite(encoder.encode([long])).all()


def test_language_model_keys_are_means_of_the_last_hidden_states():
    encoder, base = load_encoder("lm:tiny:llama"), load_base("tiny:llama")
    for text, key in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        ids = torch.tensor([base.tokenizer.encode(text)])
        with torch.no_grad():
            last = base.model(ids, output_hidden_states=True).hidden_states[-1][0].mean(0)
        assert np.allclose(key, last / last.norm(), atol=1e-5)


def test_clip_s_pictures_are_prepared_as_transformers_does(clip):
    from transformers import CLIPImageProcessorPil

    items = pictures(3)
    processor = CLIPImageProcessorPil.from_pretrained(clip)
    pixels = processor(list(items), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        features = CLIPModel.from_pretrained(clip).get_image_features(pixel_values=pixels)
    wanted = torch.nn.functional.normalize(features.pooler_output, dim=-1).numpy()
    assert np.allclose(load_encoder(f"path:{clip}").encode(items), wanted, atol=0.02)


def test_clip_names_classes_in_the_space_of_its_pictures(clip):
    encoder = load_encoder(f"path:{clip}")
    names = encoder.label_keys(["amber", "kelp"])
    assert names.shape == (2, encoder.width)
    tokens = PreTrainedTokenizerFast.from_pretrained(clip)("A photo of a kelp.")
    tokens = {k: torch.tensor([v]) for k, v in tokens.items() if k != "token_type_ids"}
    with torch.no_grad():
        features = CLIPModel.from_pretrained(clip).get_text_features(**tokens).pooler_output[0]
    assert np.allclose(names[1], features / features.norm(), atol=1e-5)


def test_sentence_encoders_name_classes_by_their_words(bert):
    encoder = load_encoder(f"path:{bert}")
    assert np.allclose(encoder.label_keys(["amber.brook"]), encoder.encode(["amber brook"]))


def test_the_digest_covers_weights_and_preprocessing(clip):
    digest = load_encoder(f"path:{clip}").digest
    encoders._load.cache_clear()
    assert load_encoder(f"path:{clip}").digest == digest
    path = clip / "preprocessor_config.json"
    path.write_text(path.read_text().replace("0.5", "0.6"))
    encoders._load.cache_clear()
    changed = load_encoder(f"path:{clip}").digest
    model = CLIPModel.from_pretrained(clip)
    with torch.no_grad():
        model.visual_projection.weight[0, 0] += 1
    model.save_pretrained(clip)
    encoders._load.cache_clear()
    assert len({digest, changed, load_encoder(f"path:{clip}").digest}) == 3


def test_a_clip_that_does_not_say_how_to_prepare_is_refused(clip):
    (clip / "preprocessor_config.json").unlink()
    with pytest.raises(Refusal, match="expected preprocessor_config"):
        load_encoder(f"path:{clip}")


def test_an_encoder_that_lacks_weights_is_refused(bert):
    from safetensors.torch import load_file, save_file

    path = bert / "model.safetensors"
    weights = load_file(path)
    lost = next(name for name in weights if "layer.1" in name)
    save_file({k: v for k, v in weights.items() if k != lost}, path, metadata={"format": "pt"})
    with pytest.raises(Refusal, match=r"lacks .*layer\.1"):
        load_encoder(f"path:{bert}")


def test_relu_features_are_fixed_and_wide():
    items = pictures(5, 8, 8, colours=0)
    encoder = load_encoder("relu:96:pixels:64")
    keys = encoder.encode(items)
    assert keys.shape == (5, 96)
    assert (keys >= 0).all()
    assert np.allclose(np.linalg.norm(keys, axis=1), 1, atol=1e-5)
    assert np.array_equal(ReluFeatures(96, Pixels(64)).encode(items), keys)
    assert encoder.digest == ReluFeatures(96, Pixels(64)).digest != load_encoder("pixels").digest
    assert encoder.label_keys(["0"]) is None


def test_relu_features_of_a_text_encoder_widen_its_names_too(bert):
    encoder = ReluFeatures(64, load_encoder(f"path:{bert}"))
    assert np.allclose(encoder.label_keys(["amber"]), encoder.encode(["amber"]))


def test_grey_pictures_are_seen_in_three_equal_colours():
    torch.manual_seed(0)
    network = efficientnet.EfficientNetLite0()
    encoder = image_encoders.ImageEncoder(network, lambda x: x, width=1280, digest="")
    grey = pictures(2, 32, 32, colours=0)
    coloured = encoder.encode(np.repeat(grey[..., None], 3, axis=3))
    assert np.allclose(encoder.encode(grey), coloured, atol=1e-6)


@pytest.mark.parametrize("size", [32, 33, 47])
def test_same_padding_halves_rounding_up(size):
    conv = efficientnet.SameConv(1, 1, 5, 2)
    assert conv(torch.zeros(1, 1, size, size)).shape[-1] == -(-size // 2)


def test_lite0_has_the_parameters_that_it_should():
    count = sum(p.numel() for p in efficientnet.EfficientNetLite0().parameters())
    assert count + 1280 * 1000 + 1000 == 4_652_008  # with the classifier: 4.65M


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("minilm", "expected one like packaged:minilm"),
        ("packaged:minlm", "expected one like"),
        ("relu:wide:pixels", "expected a width"),
        ("relu:64", "expected one like"),
        ("pixels:0", "expected a width"),
        ("lm:tiny:lama", "did you mean llama"),
        ("path:/nowhere", "no config.json"),
    ],
)
def test_unknown_encoders_are_refused(source, said):
    with pytest.raises(Refusal, match=said):
        load_encoder(source)


def test_items_of_the_wrong_kind_are_refused(bert, clip):
    with pytest.raises(Refusal, match="expected texts"):
        load_encoder(f"path:{bert}").encode(pictures(2))
    with pytest.raises(Refusal, match="expected pictures"):
        load_encoder(f"path:{clip}").encode(TEXTS)
    with pytest.raises(Refusal, match="expected images of 64 pixels"):
        load_encoder("pixels").encode(pictures(2))


def _accuracy(encoder, items, labels, fit):
    from sklearn.linear_model import RidgeClassifier

    keys = encoder.encode(items)
    return RidgeClassifier(0.1).fit(keys[:fit], labels[:fit]).score(keys[fit:], labels[fit:])


@pytest.mark.slow
def test_minilm_is_itself():
    encoder = load_encoder("packaged:minilm")
    a, b, c = encoder.encode(
        ["A man is eating food.", "Someone has a meal.", "The stock market fell."]
    )
    assert a @ b > 0.6 > 0.1 > abs(a @ c)
    skip_without("packaged:uci-sentences")
    data = load_labelled("packaged:uci-sentences")
    places = np.random.default_rng(0).permutation(1000)[:600]  # amazon
    items = [data.items[i] for i in places]
    assert _accuracy(encoder, items, data.labels[places], 400) > 0.83


@pytest.mark.slow
def test_efficientnet_is_itself():
    skip_without("packaged:cifar10")
    data = load_labelled("packaged:cifar10")
    places = np.random.default_rng(0).permutation(len(data))[:1000]
    encoder = load_encoder("packaged:efficientnet-lite0")
    assert _accuracy(encoder, data.items[places], data.labels[places], 700) > 0.74

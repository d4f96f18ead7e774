"""Streams arrive bit for bit, cost little beside the cache, and are refused when touched."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors

from fedloom.errors import Refusal
from fedloom.slices import frames
from fedloom.slices.frames import encode
from fedloom.slices.quantise import SCHEMES, quantise, restore
from fedloom.slices.reading import FrameError, FrameReader

KEY, SESSION = b"k" * 32, bytes(range(16))


def reader(piece, **told):
    return FrameReader(piece.geometry, KEY, SESSION, **told)


def refusal(piece, stream, **told) -> str:
    """Read a stream that must be refused; return the sentence."""
    found = reader(piece, **told)
    with pytest.raises(FrameError) as caught:
        read(found, b"".join(stream))
    with pytest.raises(FrameError):  # and nothing comes of it afterwards
        found.finish()
    return str(caught.value)


def read(found, *pieces: bytes):
    """Feed all, then ask for the slice."""
    for each in pieces:
        found.feed(each)
    return found.finish()


def sealed(kind, layer, number, payload, session=SESSION, length=None, key=KEY) -> bytes:
    """A frame of one's own, by somebody who has the key."""
    size = len(payload) if length is None else length
    head = frames.HEAD.pack(frames.MAGIC, frames.VERSION, kind, layer, session, number, size)
    return head + payload + frames.mac_of(key, head, payload)


def header_of(frame: bytes) -> dict:
    return json.loads(frame[frames.HEAD.size : -frames.MAC])


def with_header(stream, **changes):
    told = {**header_of(stream[0]), **changes}
    told = {name: value for name, value in told.items() if value is not None}
    return [sealed(frames.HEADER, 0, 0, json.dumps(told).encode()), *stream[1:]]


@pytest.fixture
def piece(make_slice):
    return make_slice(3, 2, 8, 6)


@pytest.fixture
def stream(piece):
    return list(encode(piece, "bf16", KEY, SESSION))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cut", [1, 7, 1000, 1 << 20])
def test_what_was_sent_arrives_in_pieces_of_any_size(piece, scheme, cut):
    stream = b"".join(encode(piece, scheme, KEY, SESSION))
    got, layers = reader(piece), []
    for start in range(0, len(stream), cut):
        layers += got.feed(stream[start : start + cut])
    arrived = got.finish()
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert (arrived.places, got.nbytes) == (piece.places, len(stream))
    for n in piece.layers:
        sent = restore(quantise(piece.keys[n], piece.values[n], scheme), scheme, (2, 6, 8))
        assert torch.equal(arrived.keys[n], sent[0])
        assert torch.equal(arrived.values[n], sent[1])
        assert torch.equal(layers[n].keys, sent[0])


def test_a_layer_is_there_before_the_next_is_sent(piece, stream):
    got = reader(piece)
    assert [len(got.feed(frame)) for frame in stream] == [0, 1, 1, 1, 0]


def test_payloads_are_safetensors_files(piece, stream):
    got = load_safetensors(stream[2][frames.HEAD.size : -frames.MAC])
    assert torch.equal(got["k"], piece.keys[1].bfloat16())
    packed = list(encode(piece, "int4", KEY, SESSION))
    parts = load_safetensors(packed[1][frames.HEAD.size : -frames.MAC])
    assert set(parts) == {"k", "k.low", "k.scale", "v", "v.low", "v.scale"}


@pytest.mark.parametrize(
    ("layers", "heads", "dim"), [(30, 3, 64), (18, 1, 256), (24, 2, 64)], ids=["smol", "gemma", "q"]
)
def test_framing_costs_under_two_percent(make_slice, layers, heads, dim):
    """SmolLM2-135M, Gemma3-270M, Qwen2.5-0.5B; 128 tokens in 16 bits."""
    piece = make_slice(layers, heads, dim, 128)
    sent = sum(map(len, encode(piece, "bf16", KEY, SESSION)))
    assert sent <= 1.02 * (2 * layers * heads * dim * 128 * 2)


def test_same_cache_same_bytes(piece, stream):
    assert stream == list(encode(piece, "bf16", KEY, SESSION))


@pytest.mark.parametrize(
    ("touch", "match"),
    [
        (lambda s: s[:-1], "truncated stream"),
        (lambda s: [*s[:2], s[2][:-5]], "truncated stream"),
        (lambda s: [s[0], s[2], s[1], *s[3:]], "reordered frame: number 2 came, 1 was"),
        (lambda s: [s[0], s[1], s[1], *s[2:]], "replayed frame: number 1 came, 2 was"),
        (lambda s: [s[0], s[0]], "replayed frame: number 0 came"),
        (lambda s: [*s, b"x"], "bytes after the end"),
        (lambda s: [b"PK" + s[0][2:]], "not a frame of version 1"),
        (lambda s: [s[0][:-1] + bytes([s[0][-1] ^ 1]), *s[1:]], "hash does not fit"),
        (lambda s: [s[0], sealed(1, 0, 1, s[1][32:-16], key=b"z" * 32)], "hash does not fit"),
        (lambda s: [s[0], sealed(1, 0, 1, s[1][32:-16], session=b"o" * 16)], "another session"),
        (lambda s: [*s[:2], sealed(1, 0, 2, s[1][32:-16])], "duplicate layer 0"),
        (lambda s: [s[0], sealed(1, 2, 1, s[1][32:-16])], "layer 2 came; 1, 0 was expected"),
        (lambda s: [s[0], sealed(1, 0, 1, b"", length=1 << 31)], "oversized frame: 2147483648"),
        (lambda s: [s[0], sealed(1, 0, 1, s[1][32:-17])], "undersized frame"),
        (lambda s: [sealed(0, 0, 0, b"", length=1 << 30)], "oversized header"),
        (lambda s: [sealed(0, 0, 0, b"[[[")], "no JSON"),
        (lambda s: [sealed(0, 0, 0, b"[" * 100000)], "no JSON"),
        (lambda s: [s[0], sealed(1, 0, 1, b"\xff" * len(s[1][32:-16]))], "safetensors header"),
        (lambda s: [*s[:-1], sealed(2, 0, 4, b"0" * 32)], "end does not fit"),
        (lambda s: with_header(s, model="n" * 64), "wrong model: nnnnnnnnnnnn came"),
        (lambda s: with_header(s, tokenizer="n"), "wrong tokenizer"),
        (lambda s: with_header(s, heads=3), "wrong geometry"),
        (lambda s: with_header(s, dim=1 << 40), "wrong geometry"),
        (lambda s: with_header(s, layers=[0, 1, 1]), "none twice"),
        (lambda s: with_header(s, layers=[0, 3]), "numbers from 0 to 2"),
        (lambda s: with_header(s, places=[]), "1 or more"),
        (lambda s: with_header(s, places=[0, True]), "whole numbers"),
        (lambda s: with_header(s, places=list(range(5000))), "oversized slice: 5000 tokens"),
        (lambda s: with_header(s, scheme="pickle"), "unknown scheme pickle"),
        (lambda s: with_header(s, scheme=None), "header must have"),
        (lambda s: with_header(s, ends=[1]), "1 ends for 6 tokens"),
    ],
    ids=range(31),
)
def test_what_is_wrong_is_named(piece, stream, touch, match):
    assert match in refusal(piece, touch(stream))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_that_are_not_finite_are_refused_at_both_ends(piece, scheme, value):
    stream = list(encode(piece, scheme, KEY, SESSION))
    bad = torch.tensor([value]).bfloat16().view(torch.uint8).numpy().tobytes()
    payload = stream[1][frames.HEAD.size : -frames.MAC]
    # bf16 ends with values, the integers with the scales of the values: bfloat16 in each
    poisoned = sealed(frames.LAYER, 0, 1, payload[:-2] + bad)
    assert "layer 0 holds a value that is not finite" in refusal(piece, [stream[0], poisoned])
    piece.values[1][0, 0, 0] = value
    with pytest.raises(Refusal, match="layer 1 of the cache"):
        list(encode(piece, scheme, KEY, SESSION))


def test_a_budget_is_kept_before_any_layer_is_read(piece, stream):
    total = sum(map(len, stream))
    assert f"oversized slice: {total} bytes" in refusal(piece, stream[:1], max_bytes=total - 1)
    got = reader(piece, max_bytes=total)
    got.feed(b"".join(stream))
    assert got.finish().tokens == 6


def test_declared_sizes_take_no_memory(piece, stream):
    """A length is refused when the head is there, before the payload is waited for."""
    got = reader(piece)
    got.feed(stream[0])
    with pytest.raises(FrameError, match="oversized"):
        got.feed(sealed(frames.LAYER, 0, 1, b"", length=0xFFFFFFFF)[: frames.HEAD.size])


def test_a_session_is_used_once(piece, stream):
    used = set()
    reader(piece, used=used).feed(b"".join(stream))
    with pytest.raises(FrameError, match="replayed session"):
        reader(piece, used=used)


def mutated(random: np.random.Generator, stream: list[bytes]) -> bytes:
    """Bits, bytes, lengths, order, ends: one thing that a network or an enemy may do."""
    whole = bytearray(b"".join(stream))
    starts = np.cumsum([0, *map(len, stream)])
    kind = random.integers(7)
    if kind == 0:
        at = int(random.integers(len(whole)))
        whole[at] ^= 1 << int(random.integers(8))
    elif kind == 1:
        for at in random.integers(len(whole), size=int(random.integers(2, 30))):
            whole[at] = int(random.integers(256))
    elif kind == 2:
        del whole[int(random.integers(len(whole))) :]
    elif kind == 3:  # the length field of some frame
        at = int(starts[random.integers(len(stream))]) + frames.HEAD.size - 4
        whole[at : at + 4] = int(random.integers(1 << 32)).to_bytes(4, "little")
    elif kind == 4:
        a, b = random.choice(len(stream), 2, replace=False)
        order = [*stream]
        order[a], order[b] = order[b], order[a]
        return b"".join(order)
    elif kind == 5:
        start, stop = sorted(random.integers(len(whole), size=2))
        del whole[int(start) : int(stop) + 1]
    else:
        at = int(random.integers(len(whole) + 1))
        whole[at:at] = random.bytes(int(random.integers(1, 50)))
    return bytes(whole)


def test_ten_thousand_mutated_streams_are_refused(make_slice):
    """None raises anything but ``FrameError``, none is accepted, and no changed layer comes out."""
    piece = make_slice(2, 1, 4, 3)
    streams = {s: list(encode(piece, s, KEY, SESSION)) for s in SCHEMES}
    wholes = {s: b"".join(stream) for s, stream in streams.items()}
    sent = {s: FrameReader(piece.geometry, KEY, SESSION).feed(w) for s, w in wholes.items()}
    random, tried = np.random.default_rng(0), 0
    while tried < 10_000:
        scheme = SCHEMES[tried % 3]
        data = mutated(random, streams[scheme])
        if data == wholes[scheme]:  # random bytes may be those that were there
            continue
        tried += 1
        got, cut = FrameReader(piece.geometry, KEY, SESSION), int(random.integers(len(data) + 1))
        with pytest.raises(FrameError):
            read(got, data[:cut], data[cut:])
        for layer, right in zip(got.layers(), sent[scheme], strict=False):
            assert torch.equal(layer.keys, right.keys)
            assert torch.equal(layer.values, right.values)


def test_payloads_by_an_insider_are_refused_or_well_formed(make_slice):
    """With the key and a correct hash there is still nothing that crashes the reader."""
    piece, random = make_slice(2, 1, 4, 3), np.random.default_rng(1)
    stream = list(encode(piece, "int8", KEY, SESSION))
    accepted = 0
    for _ in range(2000):
        which = int(random.integers(len(stream)))
        payload = bytearray(stream[which][frames.HEAD.size : -frames.MAC])
        for at in random.integers(len(payload), size=int(random.integers(1, 4))):
            payload[at] = int(random.integers(256))
        kind, layer = stream[which][5], int.from_bytes(stream[which][6:8], "little")
        forged = [*stream[:which], sealed(kind, layer, which, bytes(payload)), *stream[which + 1 :]]
        got = FrameReader(piece.geometry, KEY, SESSION)
        try:
            got.feed(b"".join(forged))
            piece = got.finish()
        except FrameError:
            continue
        accepted += 1
        assert all(x.isfinite().all() for x in (*piece.keys.values(), *piece.values.values()))
    assert accepted < 100  # the end frame's hash catches all but what it does not cover

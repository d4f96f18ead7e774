"""What fits in a part of the bytes really fits, one token more does not, whichever were chosen."""

from __future__ import annotations

import pytest
import torch

from fedloom.errors import Refusal
from fedloom.slices.fitting import fitting, plain_bytes, stream_bytes
from fedloom.slices.frames import encode
from fedloom.slices.quantise import GROUP, SCHEMES
from fedloom.slices.reading import FrameError, FrameReader
from fedloom.slices.slice import CacheSlice

KEY, SESSION = bytes(32), bytes(range(16))
SHAPES = [(3, 1, 96, 111), (2, 3, 65, 1001), (4, 2, 64, GROUP["int8"] * 2 + 1), (1, 5, 17, 259)]


def chosen(piece: CacheSlice, places, ends=()) -> CacheSlice:
    keys, values = ({n: x[:, places] for n, x in p.items()} for p in (piece.keys, piece.values))
    return CacheSlice(piece.geometry, keys, values, tuple(places), tuple(ends))


def length(piece: CacheSlice, scheme: str) -> int:
    return sum(map(len, encode(piece, scheme, KEY, SESSION)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_counted_bytes_are_those_of_the_frames(make_slice, scheme, shape):
    piece = make_slice(*shape)
    places = [0, *range(5, shape[3], 3)]
    for ends in ((), tuple(7 * p for p in places)):
        some = chosen(piece, places, ends)
        told = (piece.geometry, piece.layers, places, scheme, ends)
        assert stream_bytes(*told) == length(some, scheme)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_ends", [False, True])
@pytest.mark.parametrize("part", [0.25, 0.4])
def test_the_most_that_fits_and_whichever_tokens(make_slice, shape, with_ends, part):
    piece, tokens = make_slice(*shape), shape[3]
    ends = tuple(9 * p for p in range(tokens)) if with_ends else ()
    limit = part * plain_bytes(piece.geometry, piece.layers, tokens)
    count = fitting(piece.geometry, piece.layers, tokens, "int8", part, ends)
    assert 2 <= count < 2 * part * tokens
    random = torch.Generator().manual_seed(count)
    drawn = sorted(torch.randperm(tokens, generator=random)[:count].tolist())
    last = list(range(tokens - count, tokens))
    for places in (last, [0, *last[1:]], drawn):
        some = chosen(piece, places, [ends[p] for p in places] if ends else ())
        assert length(some, "int8") <= limit
    more = list(range(tokens - count - 1, tokens))
    assert length(chosen(piece, more, [ends[p] for p in more] if ends else ()), "int8") > limit


def test_all_may_fit_and_two_must(make_slice):
    piece = make_slice(2, 2, 64, 50)
    assert fitting(piece.geometry, piece.layers, 50, "int4", 1.0) == 50
    small = make_slice(1, 1, 4, 6)
    with pytest.raises(Refusal, match="no two tokens of 6"):
        fitting(small.geometry, small.layers, 6, "int8", 0.25)
    for part in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(Refusal, match="above 0 and at most 1"):
            fitting(piece.geometry, piece.layers, 50, "int8", part)


def test_a_reader_with_that_many_bytes_takes_it_and_refuses_one_token_more(make_slice):
    """The bound is the reader's too: what is declared is added up before a layer is held."""
    piece = make_slice(3, 2, 48, 77)
    limit = int(0.25 * plain_bytes(piece.geometry, piece.layers, 77))
    count = fitting(piece.geometry, piece.layers, 77, "int8", 0.25)
    for more in (0, 1):
        frames = list(encode(chosen(piece, range(77 - count - more, 77)), "int8", KEY, SESSION))
        reader = FrameReader(piece.geometry, KEY, SESSION, max_bytes=limit)
        if more:
            with pytest.raises(FrameError, match="oversized"):
                reader.feed(frames[0])
            continue
        for frame in frames:
            reader.feed(frame)
        assert reader.finish().tokens == count
        assert reader.nbytes <= limit

"""Fusing begins while the rest of a slice is on its way, and gives the bits of all at once."""

from __future__ import annotations

import pytest
import torch

from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.refining import Sender
from fedloom.refining.inflight import InFlight
from fedloom.slices.frames import encode
from fedloom.slices.geometry import Geometry
from fedloom.slices.slice import CacheSlice

from asking import asked, lost, sender, standing
from rooms import fuser_of, room

DEEP = 6  # layers of a sender that is made up; the receiver has two


def made_up(scale: float = 1.0) -> CacheSlice:
    """A slice of a model that need not exist: 6 layers of 2 heads, 9 tokens."""
    random, shape = torch.Generator().manual_seed(5), (2, 9, 8)
    by_layer = ((0,) * DEEP, (1e4,) * DEEP, (1.0,) * DEEP)
    geometry = Geometry("m" * 64, "t" * 64, "llama", DEEP, 2, 8, *by_layer, 1000)
    keys, values = (
        {n: scale * torch.randn(shape, generator=random).bfloat16().float() for n in range(DEEP)}
        for _ in "kv"
    )
    return CacheSlice(geometry, keys, values, tuple(range(9)))


def fuser_from(piece: CacheSlice, taps: int = 1) -> CacheFuser:
    config = FuserConfig(width=16, taps=taps)
    made = CacheFuser(piece.geometry, room("qwen3")[1], config).eval().requires_grad_(False)
    return made.to(torch.float64)


class Line:
    """A line that counts the frames that were taken off it, and when the fuser worked."""

    def __init__(self, piece: CacheSlice, fuser: CacheFuser, *, spoil=None) -> None:
        self.piece, self.fuser, self.spoil = piece, fuser, spoil or (lambda frames: frames)
        self.taken, self.worked = 0, []
        fuser.projector.register_forward_hook(lambda *_: self.worked.append(self.taken))

    def sender(self) -> Sender:
        return Sender(self.piece.geometry, self.ask, self.fuser, "deep")

    def ask(self, request):
        kept = {n: self.piece.keys[n] for n in request.layers}
        values = {n: self.piece.values[n] for n in request.layers}
        piece = CacheSlice(self.piece.geometry, kept, values, self.piece.places)
        frames = list(encode(piece, request.scheme, request.key, request.session))
        for frame in self.spoil(frames):
            self.taken += 1
            yield frame


def test_layer_0_is_projected_before_the_last_frame_is_read():
    """Four frames: header, layer 0, layer 5, end."""
    line = Line(made_up(), fuser_from(made_up()))
    assert line.fuser.sender_layers == (0, 5)
    answer = asked([line.sender()])
    assert line.taken == 4
    assert line.worked == [2, 3]  # each layer once, as soon as its own frame was there
    (source,) = answer.receipt.sources
    assert (source.status, source.early) == ("used", 2)
    assert answer.ids != standing()


def test_a_layer_waits_for_all_that_it_looks_at():
    line = Line(made_up(), fuser_from(made_up(), taps=3))
    assert sorted(line.fuser.sources[0]) == [0, 1, 2]
    asked([line.sender()])
    assert line.worked == [4, 7]  # behind the header, three frames each; the end is the eighth
    assert line.taken == 8


@pytest.mark.parametrize("taps", [1, 3])
def test_the_bits_are_those_of_all_at_once(taps):
    """As frames, as one block, as bytes cut anywhere, and as a slice that never travelled."""

    def cut(size):
        def spoil(frames):
            whole = b"".join(frames)
            return [whole[i : i + size] for i in range(0, len(whole), size)]

        return spoil

    piece = made_up()  # its numbers are 16 bits wide, so that a slice is what its frames are
    ways = [None, cut(1 << 30), cut(61)]  # 61: less than the end's own frame
    lines = [Line(piece, fuser_from(piece, taps), spoil=spoil) for spoil in ways]
    answers = [asked([line.sender()]) for line in lines]
    whole = Sender(piece.geometry, lambda request: piece, fuser_from(piece, taps), "deep")
    answers.append(asked([whole]))
    assert all(torch.equal(a.logits, answers[0].logits) for a in answers)
    assert [a.receipt.sources[0].early for a in answers] == [2, 0, 2, 0]
    assert all(len(line.worked) == 2 for line in lines)


def mutated(frames):
    spoilt = bytearray(frames[2])
    spoilt[-20] ^= 1
    return [*frames[:2], bytes(spoilt), *frames[3:]]


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (mutated, "integrity"),
        (lambda frames: frames[:-1], "gone"),
        (lambda frames: [*frames[:2], frames[3]], "integrity"),
        (lambda frames: [*frames, b"\x00"], "integrity"),
    ],
    ids=["mutated", "truncated", "dropped", "more"],
)
def test_what_was_made_of_half_a_stream_is_not_used(spoil, cause):
    line = Line(made_up(), fuser_from(made_up()), spoil=spoil)
    answer = asked([line.sender(), sender("qwen2")])
    assert line.worked[0] == 2  # layer 0 was projected, and is nothing now
    assert lost(answer) == {"deep": cause}
    assert torch.equal(answer.logits, asked([sender("qwen2")]).logits)
    again = Line(made_up(), fuser_from(made_up()), spoil=spoil)
    assert asked([again.sender()]).ids == standing()


def test_residual_fusers_and_ones_own_model_wait_for_the_whole():
    flights = [InFlight(fuser_of("llama", "qwen3", mode="residual")), InFlight(None)]
    assert all((flight.made, flight.early) == ({}, 0) for flight in flights)
    fuser = fuser_of("llama", "qwen3", mode="residual")
    assert asked([sender("llama", fuser=fuser)]).receipt.sources[0].early == 0

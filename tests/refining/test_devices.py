"""Fuser, slices and receiver may lie on different devices; meta tensors stand in for a GPU's.

A meta tensor has a shape and a device and no numbers: what would mix devices raises, as on a GPU.
What needs numbers is in the tests that want one, and are skipped by name where there is none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.adapters.fused import FusedContext
from fedloom.adapters.gates import Draw
from fedloom.errors import Refusal
from fedloom.models.base import load_base, pick_device
from fedloom.refining import Terms, local, measured, refine
from fedloom.slices.slice import batch_of

from rooms import PROMPT, fuser_of, piece_of

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def batch(family: str):
    return batch_of([piece_of(family, PROMPT, dtype="float32")])


def test_a_fuser_reads_what_lies_elsewhere():
    draw = Draw(1.0, torch.Generator().manual_seed(0))
    for told, target in (({}, None), ({"mode": "residual"}, batch("qwen3"))):
        fuser = fuser_of("llama", "qwen3", "float32", **told).to("meta").train()
        guests = fuser(batch("llama"), target, draw)
        assert {x.device.type for x in guests.keys.values()} == {"meta"}
        assert guests.real_BT.device.type == "cpu"


@pytest.mark.parametrize("soft", [False, True], ids=["served", "taught"])
def test_guests_their_gates_and_their_bias_come_to_the_receiver(soft):
    base = load_base("tiny:qwen3", "float32", "meta")
    fuser = fuser_of("llama", "qwen3", "float32")
    with torch.no_grad():
        fuser.bias.fill_(0.7)
    draw = Draw(1.0, torch.Generator().manual_seed(0)) if soft else None
    context = FusedContext(base.model, [fuser(batch("llama"), draw=draw)])
    assert {layer.keys.device.type for layer in context.cache.layers} == {"meta"}
    for part in (context.columns.bias, context.columns.real):
        assert sorted(part) == [0, 1]
        assert {x.device.type for x in part.values()} == {"meta"}


def test_a_device_that_is_not_there_is_refused():
    assert pick_device("cpu") == "cpu"
    assert pick_device() == ("cuda:0" if torch.cuda.is_available() else "cpu")
    for told in ("cudda", "cuda:99", "gpu:0"):
        with pytest.raises(Refusal, match=f'device "{told}": expected auto'):
            pick_device(told)


@gpu
@pytest.mark.parametrize("mode", ["prefix", "residual"])
def test_on_a_gpu_the_answer_is_the_cpus(mode):
    made = []
    for device in ("cpu", "cuda:0"):
        receiver, sender = (load_base(f"tiny:{f}", "float64", device) for f in ("qwen3", "llama"))
        fuser = fuser_of("llama", "qwen3", mode=mode)  # on the CPU, as a file is read
        if mode == "prefix":
            with torch.no_grad():
                fuser.bias.fill_(0.7)
        heard = local(sender, measured(sender), fuser, "llama")
        terms = Terms(deadline=60.0)
        made.append(
            refine(receiver, "what is it?", [heard], terms=terms, max_new_tokens=6, stop=())
        )
    assert made[0].ids == made[1].ids
    assert made[1].receipt.mode == mode
    torch.testing.assert_close(made[1].logits.cpu(), made[0].logits, rtol=0, atol=1e-6)


@gpu
def test_a_slice_on_the_cpu_is_heard_on_a_gpu():
    receiver = load_base("tiny:qwen3", "float64", "cuda:0")
    fuser, piece = fuser_of("llama", "qwen3"), piece_of("llama", PROMPT)
    heard = replace(local(receiver, fuser.sender, fuser, "llama"), ask=lambda request: piece)
    answer = refine(receiver, "what is it?", [heard], max_new_tokens=2, stop=())
    assert answer.receipt.mode == "prefix"

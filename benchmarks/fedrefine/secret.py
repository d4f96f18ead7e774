# SPDX-License-Identifier: Apache-2.0
"""A fact that only the sender sees reaches a receiver of another architecture and vocabulary.

Both models are frozen, random and never see each other: a two-layer Llama and a three-layer Qwen3
with other heads, head dimensions, rotary bases and another vocabulary in another order.  The sender
reads a secret between two tokens of noise; the receiver reads the same question every time and
must name the secret in its own vocabulary.  What it can know came through the fuser, which is
trained on the receiver's cross-entropy alone.

Controls: the caches of other questions (``shuffled``; ``follows_sender`` counts how often the
answer is then the other question's), caches of zeros (``zeroed``), an untrained fuser, the
receiver alone.  ``seated_first`` and ``seated_last`` add a second guest that knows nothing, which
no training saw, behind or before the one that knows.  Every slice that is tested goes through
frames: encode, bytes, decode.  With ``--through-flower`` the sender is a node of its own in
Flower's message API, in one process: it is sent contexts, reads them and replies with frames, and
every message is serialised.  Run as ``python benchmarks/fedrefine/secret.py [--quick]
[--through-flower]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fedloom import border, wire
from fedloom.adapters.fused import FusedContext
from fedloom.adapters.fuser import CacheFuser, FuserConfig, Guests
from fedloom.adapters.gates import Draw, temperature
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.slices.frames import encode
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.reading import FrameReader
from fedloom.slices.slice import CacheSlice, SliceBatch, batch_of, export_batch, export_cache

SECRETS, NOISE = 12, 40
CHANCE = 1 / SECRETS
STEPS, WARM_UP, BATCH, RATE = 250, 20, 24, 4e-3
TESTED = 240
SCHEMES = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class Room:
    """A random model, its geometry, and the word ids of its own vocabulary."""

    model: PreTrainedModel
    geometry: Geometry
    words: Tensor
    """Word -> id: each vocabulary has the words in an order of its own, among others."""


def build(family: str, seed: int, **shape: int) -> Room:
    config = AutoConfig.for_model(
        family,
        intermediate_size=96,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.25,  # wide enough that tokens get different logits
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": shape.pop("rope_theta")},
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        words = torch.randperm(config.vocab_size)[: SECRETS + NOISE]
    model.requires_grad_(False).eval()
    weights = {name: x.numpy() for name, x in sorted(model.named_parameters())}
    vocabulary = hashlib.sha256(words.numpy().tobytes()).hexdigest()
    return Room(model, geometry_of(model, wire.arrays_digest(weights), vocabulary), words)


def contexts(sender: Room, count: int, random: torch.Generator) -> tuple[Tensor, list[list[int]]]:
    """Draw secrets and what the sender reads: one or two noise words, the secret, one or two more.

    Lengths differ, so that the secret has no fixed place.
    """
    drawn = torch.randint(SECRETS, (count,), generator=random)
    rows = []
    for secret in drawn.tolist():
        sides = torch.randint(1, 3, (2,), generator=random).tolist()
        before, after = (
            (SECRETS + torch.randint(NOISE, (n,), generator=random)).tolist() for n in sides
        )
        rows.append(sender.words[[*before, secret, *after]].tolist())
    return drawn, rows


def held(room: Room, rows: list[list[int]]) -> SliceBatch:
    return export_batch(room.model, room.geometry, rows)


def said(receiver: Room, fuser: CacheFuser, source: SliceBatch, draw: Draw | None) -> Tensor:
    """Return the receiver's logits after its question, over its own vocabulary, [B, V]."""
    return asked(receiver, [fuser(source, draw=draw)])


def asked(receiver: Room, guests: list[Guests]) -> Tensor:
    """Ask with guests seated in this order."""
    question = receiver.words[SECRETS : SECRETS + 3].expand(len(guests[0].real_BT), -1)
    return FusedContext(receiver.model, guests).read(question, keep=1)[:, -1]


def learn(sender: Room, receiver: Room, seed: int, steps: int) -> CacheFuser:
    fuser = CacheFuser(sender.geometry, receiver.geometry, FuserConfig(width=32), seed=seed)
    random = torch.Generator().manual_seed(seed)
    _, rows = contexts(sender, 200, random)
    read = torch.randint(len(receiver.words), (100, 4), generator=random)
    fuser.calibrate([held(sender, rows)], [held(receiver, receiver.words[read].tolist())])
    optimiser = torch.optim.AdamW(fuser.parameters(), lr=RATE, weight_decay=0.01)
    fuser.train()
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.param_groups[0]["lr"] = RATE * min((step + 1) / WARM_UP, decay)
        secret, rows = contexts(sender, BATCH, random)
        draw = Draw(temperature(step, steps, last=0.1), random)
        logits = said(receiver, fuser, held(sender, rows), draw)
        F.cross_entropy(logits, receiver.words[secret]).backward()
        torch.nn.utils.clip_grad_norm_(fuser.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    return fuser.eval().requires_grad_(False)


def through_frames(piece: CacheSlice, scheme: str) -> tuple[CacheSlice, int]:
    """Send a slice as bytes, as a node would; return what arrived and the bytes."""
    key, session = secrets.token_bytes(32), secrets.token_bytes(16)
    reader = FrameReader(piece.geometry, key, session)
    for frame in encode(piece, scheme, key, session):
        reader.feed(frame)
    return reader.finish(), reader.nbytes


def zeroed(piece: CacheSlice) -> CacheSlice:
    keys, values = (
        {n: torch.zeros_like(x) for n, x in p.items()} for p in (piece.keys, piece.values)
    )
    return replace(piece, keys=keys, values=values)


Fetch = Callable[[list[list[int]], str, bool], tuple[list[CacheSlice], int]]
"""Contexts, scheme, whether to zero the caches -> what arrived, and bytes of frames."""


def by_frames(sender: Room) -> Fetch:
    """Let the sender read and send in this function."""

    def fetch(rows: list[list[int]], scheme: str, zero: bool) -> tuple[list[CacheSlice], int]:
        pieces = [export_cache(sender.model, sender.geometry, row) for row in rows]
        came = [through_frames(zeroed(p) if zero else p, scheme) for p in pieces]
        return [piece for piece, _ in came], sum(count for _, count in came)

    return fetch


def by_flower(sender: Room) -> Fetch:
    """Let the sender be a Flower node that is asked by messages and answers with frames."""
    app = ClientApp()

    @app.query("export_cache")
    def export(message: Message, context: Context) -> Message:
        told = border.config_of(message.content)
        made = {}
        for name, row in border.arrays_of(message.content).items():
            piece = export_cache(sender.model, sender.geometry, row.tolist())
            piece = zeroed(piece) if told["zero"] else piece
            session = int(name).to_bytes(16, "big")
            frames = b"".join(encode(piece, told["scheme"], told["key"], session))
            made[name] = np.frombuffer(frames, np.uint8)
        return Message(border.content(made), reply_to=message)

    grid = InProcessGrid(app, 1, {})

    def fetch(rows: list[list[int]], scheme: str, zero: bool) -> tuple[list[CacheSlice], int]:
        key = secrets.token_bytes(32)
        arrays = {f"{i}": np.array(row) for i, row in enumerate(rows)}
        records = border.content(arrays, {"scheme": scheme, "zero": zero, "key": key})
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(records, node, "query.export_cache")])
        came, count = [], 0
        for name, data in border.arrays_of(reply.content).items():
            reader = FrameReader(sender.geometry, key, int(name).to_bytes(16, "big"))
            reader.feed(data.tobytes())
            came.append(reader.finish())
            count += reader.nbytes
        return came, count

    return fetch


@torch.no_grad()
def measure(seed: int, steps: int, carry: Callable[[Room], Fetch]) -> dict[str, float]:
    """Train one pair from one seed and test it on contexts that it has not seen."""
    began = time.perf_counter()
    sender = build(
        "llama",
        10 + seed,
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        rope_theta=500_000,
    )
    receiver = build(
        "qwen3",
        20 + seed,
        vocab_size=131,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=1_000_000,
    )
    with torch.enable_grad():
        fuser = learn(sender, receiver, seed, steps)
    seconds = time.perf_counter() - began
    random = torch.Generator().manual_seed(1000 + seed)
    secret, rows = contexts(sender, TESTED, random)
    right = receiver.words[secret]
    fetch = carry(sender)
    pieces, sent = fetch(rows, "bf16", False)

    def answers(scheme: str, by: CacheFuser = fuser, zero: bool = False) -> Tensor:
        arrived = batch_of(fetch(rows, scheme, zero)[0])
        return said(receiver, by, arrived, None).argmax(-1)

    def share(answer: Tensor, wanted: Tensor = right) -> float:
        return (answer == wanted).float().mean().item()

    order = torch.randperm(TESTED, generator=random)
    mixed = batch_of(fetch([rows[i] for i in order.tolist()], "bf16", False)[0])
    others = said(receiver, fuser, mixed, None).argmax(-1)
    untrained = CacheFuser(sender.geometry, receiver.geometry, FuserConfig(width=32), seed=-1)
    question = receiver.words[SECRETS : SECRETS + 3][None]
    idle = sender.words[SECRETS + torch.randint(NOISE, (TESTED, 3), generator=random)].tolist()
    pair = [fuser(batch_of(pieces)), fuser(held(sender, idle))]
    first, last = asked(receiver, pair), asked(receiver, pair[::-1])
    return {
        "matched": share(answers("bf16")),
        "int8": share(answers("int8")),
        "int4": share(answers("int4")),
        "shuffled": share(others),
        "follows_sender": share(others, right[order]),
        "zeroed": share(answers("bf16", zero=True)),
        "untrained": share(answers("bf16", untrained.eval())),
        "alone": share(FusedContext(receiver.model).read(question)[:, -1].argmax(-1)),
        "seated_first": share(first.argmax(-1)),
        "seated_last": share(last.argmax(-1)),
        "order_logit_gap": (first - last).abs().max().item(),
        "open_layers": len(fuser.open_layers()) / len(fuser.layers),
        "frame_bytes": sent / len(rows),
        "train_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed in place of three")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--through-flower", action="store_true", help="the sender is a Flower node")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, busy = time.perf_counter(), time.process_time()
    seeds = [0] if given.quick else [0, 1, 2]
    carry = by_flower if given.through_flower else by_frames
    results = {seed: measure(seed, given.steps, carry) for seed in seeds}
    names = list(results[seeds[0]])
    print(f"chance {CHANCE:.4f}; {TESTED} contexts a seed; torch {torch.__version__}\n")
    print("| seed | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 1) + "|")
    for seed, row in results.items():
        print(f"| {seed} | " + " | ".join(f"{row[n]:.3f}" for n in names) + " |")
    found = {name: round(mean(row[name] for row in results.values()), 4) for name in names}
    found |= {
        "matched": round(min(row["matched"] for row in results.values()), 4),  # of the worst seed
        "chance": round(CHANCE, 4),
        "seeds": len(seeds),
        "through": "flower" if given.through_flower else "frames",
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - busy, 1),
    }
    print(json.dumps(found | {"transformers": transformers.__version__}))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""One answer with another model's cache, and one with 80 tokens of its text, over a real socket.

A second process holds the sender and serves it over TCP on loopback: requests and frames carry a
keyed hash under a key that both were started with.  The receiver, in this process, either fuses the
frames that come (``refine``) or reads the text that comes (``t2t``) and then writes the same number
of tokens.  Each repeat is one question by both ways, one after the other in turns; figures are
medians over questions, ``speedup`` the median of the ratios within a question.  Seconds are those
that passed and, beside them, those of the processors of both processes, one thread each: on a busy
machine the second are what an idle one would take.

The fuser is untrained and has the default size: time does not depend on what it learnt.  Nothing
overlaps: fusing waits for the last frame.  The text is of exactly 80 tokens, whatever they say.
Times on slower links are computed from the bytes that were counted and the processors' seconds.
Run as ``python benchmarks/fedrefine/latency.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from latency_table import PARTS, summary, tables

from fedloom import seeds
from fedloom.adapters.fused import FusedContext
from fedloom.adapters.fuser import CacheFuser
from fedloom.data.prompts import prompt
from fedloom.data.questions import Question, load_questions
from fedloom.models.base import Base, load_base
from fedloom.refining.rephrasing import rephrase
from fedloom.refining.text import ASK, Written, with_context
from fedloom.refining.writing import decoded, instructed
from fedloom.slices.fitting import fitting
from fedloom.slices.frames import encode
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.reading import FrameReader
from fedloom.slices.slice import CacheSlice, batch_of, export_cache

SENDER, RECEIVER = "embedded:qwen2.5-coder-0.5b", "embedded:smollm2-135m"
WRITTEN, ANSWER = 80, 8
WAYS = (("bf16", 1.0), ("int8", 1.0), ("int4", 1.0), ("bf16", 0.5), ("int8", 0.5), ("int4", 0.5))
LENGTH = struct.Struct("<I")


class Clock:
    """Seconds by part of one answer: as they passed, and of this process's processor."""

    def __init__(self) -> None:
        self.seconds, self.busy = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the block's seconds to a part."""
        began, busy = time.perf_counter(), time.process_time()
        yield
        self.seconds[part] += time.perf_counter() - began
        self.busy[part] += time.process_time() - busy


def mac_of(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=16).digest()


def send_block(link: socket.socket, key: bytes, told: dict[str, Any]) -> int:
    """Send one JSON object with its length and its hash; return the bytes."""
    data = json.dumps(told).encode()
    block = LENGTH.pack(len(data)) + data + mac_of(key, data)
    link.sendall(block)
    return len(block)


def read_exactly(link: socket.socket, count: int) -> bytes:
    held = bytearray()
    while len(held) < count:
        if not (data := link.recv(min(1 << 16, count - len(held)))):
            raise ConnectionError("the other end closed the line")
        held += data
    return bytes(held)


def read_block(link: socket.socket, key: bytes) -> tuple[dict[str, Any], int]:
    (length,) = LENGTH.unpack(read_exactly(link, LENGTH.size))
    if length > 1 << 20:
        raise ConnectionError(f"a block of {length} bytes: at most a megabyte is read")
    data, mac = read_exactly(link, length), read_exactly(link, 16)
    if not hmac.compare_digest(mac_of(key, data), mac):
        raise ConnectionError("a block whose hash does not fit")
    return json.loads(data), LENGTH.size + length + 16


def serve(args: argparse.Namespace) -> None:
    """Be the sender: answer requests one after the other until the line to the parent closes."""
    key = bytes.fromhex(sys.stdin.readline().strip())
    base = load_base(args.sender)
    geometry = geometry_of(base.model, base.base_hash, base.tokenizer_hash)
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = {"port": server.getsockname()[1], "geometry": geometry.to_json()}
        print(json.dumps(told), flush=True)
        while True:
            link, _ = server.accept()
            with link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                request, _ = read_block(link, key)
                if request["want"] == "stop":
                    return
                give = give_cache if request["want"] == "cache" else give_text
                give(link, key, base, geometry, request)


def give_cache(
    link: socket.socket, key: bytes, base: Base, geometry: Geometry, request: dict[str, Any]
) -> None:
    clock = Clock()
    with clock.on("sender prefill"):
        ids = base.tokenizer.encode(request["text"])
        keep = max(1, round(request["share"] * len(ids)))
        piece = export_cache(base.model, geometry, ids, keep=keep)
    with clock.on("serialise"):
        session = bytes.fromhex(request["session"])
        stream = b"".join(encode(piece, request["scheme"], key, session))
    told = {"seconds": clock.seconds, "busy": clock.busy, "tokens": len(ids)}
    send_block(link, key, told | {"bytes": len(stream)})
    link.sendall(stream)


@torch.no_grad()
def give_text(
    link: socket.socket, key: bytes, base: Base, geometry: Geometry, request: dict[str, Any]
) -> None:
    clock = Clock()
    with clock.on("sender prefill"):
        ids, _ = instructed(base, ASK.format(question=request["text"]))
        context = FusedContext(base.model)
        last = context.read(torch.tensor([ids]), keep=1)[0, -1]
    with clock.on("sender decode"):
        made = written(context, last, request["budget"])
        text = decoded(base, made)
    told = {"seconds": clock.seconds, "busy": clock.busy, "tokens": len(made)}
    send_block(link, key, told | {"text": text})


def written(context: FusedContext, last: torch.Tensor, count: int) -> list[int]:
    """Write exactly so many tokens: an early end would make the comparison another one."""
    made: list[int] = []
    while len(made) < count:
        made.append(int(last.argmax()))
        last = context.read(torch.tensor([[made[-1]]]), keep=1)[0, -1]
    return made


class Line:
    """The receiver's way to the sender's process."""

    def __init__(self, sender: str, threads: int) -> None:
        self.key = secrets.token_bytes(32)
        command = [sys.executable, __file__, "--serve", "--sender", sender]
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(self.key.hex() + "\n")
        self.process.stdin.flush()
        told = json.loads(self.process.stdout.readline())
        self.port, self.geometry = told["port"], Geometry.from_json(told["geometry"])

    def open(self) -> socket.socket:
        """Connect anew, as each request does."""
        link = socket.create_connection(("127.0.0.1", self.port))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    def cache(
        self, clock: Clock, text: str, scheme: str, share: float
    ) -> tuple[CacheSlice, int, int]:
        """Ask for a cache; return the slice, bytes of frames and tokens that the sender read."""
        session = secrets.token_bytes(16)
        request = {"want": "cache", "text": text, "scheme": scheme, "share": share}
        began = time.perf_counter()
        with self.open() as link:
            send_block(link, self.key, request | {"session": session.hex()})
            told, _ = read_block(link, self.key)
            stream = read_exactly(link, told["bytes"])
        self._split(clock, time.perf_counter() - began, told)
        with clock.on("verify"):
            reader = FrameReader(self.geometry, self.key, session)
            reader.feed(stream)
            piece = reader.finish()
        return piece, len(stream), told["tokens"]

    def text(self, clock: Clock, text: str, budget: int) -> tuple[str, int]:
        """Ask for text; return it and the bytes of the reply."""
        began = time.perf_counter()
        with self.open() as link:
            send_block(link, self.key, {"want": "text", "text": text, "budget": budget})
            told, size = read_block(link, self.key)
        self._split(clock, time.perf_counter() - began, told)
        assert told["tokens"] == budget
        return told["text"], size

    @staticmethod
    def _split(clock: Clock, whole: float, told: dict[str, Any]) -> None:
        """What the sender does not account for was spent on the way."""
        for part in PARTS:
            clock.seconds[part] += told["seconds"][part]
            clock.busy[part] += told["busy"][part]
        clock.seconds["network"] += whole - sum(told["seconds"].values())

    def close(self) -> None:
        """End the sender's process."""
        with self.open() as link:
            send_block(link, self.key, {"want": "stop"})
        self.process.wait(timeout=30)


@torch.no_grad()
def finish(clock: Clock, base: Base, asked: Question, guests: list[Any]) -> None:
    """Read the receiver's prompt and write the answer."""
    ids = base.tokenizer.encode(prompt(asked))
    with clock.on("receiver prefill"):
        context = FusedContext(base.model, guests)
        last = context.read(torch.tensor([ids]), keep=1)[0, -1]
    with clock.on("decode"):
        written(context, last, ANSWER)


@torch.no_grad()
def refined(line: Line, base: Base, fuser: CacheFuser, asked: Question) -> tuple[Clock, int, int]:
    clock = Clock()
    piece, nbytes, tokens = line.cache(clock, prompt(asked), "bf16", 1.0)
    with clock.on("fuse"):
        guests = fuser(batch_of([piece]))
    finish(clock, base, asked, [guests])
    return clock, nbytes, tokens


def told(line: Line, base: Base, asked: Question, budget: int) -> tuple[Clock, int]:
    clock = Clock()
    text, nbytes = line.text(clock, asked.question, budget)
    message = Written(line.geometry.model, text, budget, nbytes, 0.0)
    finish(clock, base, with_context(asked, [message]), [])
    return clock, nbytes


def rephrased(base: Base, asked: Question) -> Clock:
    """Time one attempt, its checks included; small models need several, or give up."""
    clock = Clock()
    with clock.on("rephrase"):
        rephrase(base, asked, seed=0, tries=1)
    return clock


def sizes_of(piece: CacheSlice) -> dict[tuple[str, float], int]:
    """Count the frames of a slice in every form."""
    found, key = {}, secrets.token_bytes(32)
    for scheme, share in WAYS:
        keep = max(1, round(share * piece.tokens))
        places = [0, *range(piece.tokens - keep + 1, piece.tokens)]
        parts = ({n: x[:, places] for n, x in p.items()} for p in (piece.keys, piece.values))
        part = CacheSlice(piece.geometry, *parts, tuple(places))
        found[scheme, share] = sum(map(len, encode(part, scheme, key, key[:16])))
    return found


def quarter_of(piece: CacheSlice) -> tuple[int, int]:
    """Take what fits, by int8, in a quarter of the 16-bit bytes; return its tokens and bytes."""
    keep, key = fitting(piece.geometry, piece.layers, piece.tokens, "int8", 0.25), bytes(32)
    places = [0, *range(piece.tokens - keep + 1, piece.tokens)]
    parts = ({n: x[:, places] for n, x in p.items()} for p in (piece.keys, piece.values))
    part = CacheSlice(piece.geometry, *parts, tuple(places))
    return keep, sum(map(len, encode(part, "int8", key, key[:16])))


def pick(base: Base, quick: bool, count: int) -> list[Question]:
    """Take questions whose prompts have 110 to 150 of the receiver's tokens."""
    if quick:
        text = "which of these words is the longest of all the words that are here"
        return [Question("made_up", f"{i}: {text}?", ("a", "bb"), 1) for i in range(count)]
    rows = sorted(load_questions("packaged:mmlu-dev"), key=Question.row)
    fit = [q for q in rows if 110 <= len(base.tokenizer.encode(prompt(q))) <= 150]
    order = seeds.generator(0, "latency").permutation(len(fit))[:count]
    return [fit[i] for i in order]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    base = load_base(args.receiver)
    geometry = geometry_of(base.model, base.base_hash, base.tokenizer_hash)
    line = Line(args.sender, args.threads)
    fuser = CacheFuser(line.geometry, geometry).eval().requires_grad_(False)
    asked = pick(base, args.quick, args.repeats + 1)
    rows = []
    for turn, question in enumerate(asked):
        row: dict[str, Any] = {}
        for way in ("refine", "t2t") if turn % 2 else ("t2t", "refine"):
            if way == "refine":
                clock, nbytes, tokens = refined(line, base, fuser, question)
                row |= {"kv_bytes": nbytes, "tokens": tokens}
            else:
                budget = args.written if turn else 4  # the first question warms up
                clock, row["text_bytes"] = told(line, base, question, budget)
            row[way] = clock
        if turn:
            row["rephrase"] = rephrased(base, question)
            rows.append(row)
            spent = {w: sum(row[w].busy.values()) for w in ("refine", "t2t", "rephrase")}
            said = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in spent.items())
            print(f"question {turn} of {args.repeats}, of a core: {said}", file=sys.stderr)
    piece, _, _ = line.cache(Clock(), prompt(asked[1]), "bf16", 1.0)
    sizes = sizes_of(piece)
    _, sent, _ = line.cache(Clock(), prompt(asked[1]), "int8", 0.5)
    assert sent == sizes["int8", 0.5]  # what is counted here is what the sender sends
    line.close()
    found = summary(args, line.geometry, fuser.parameter_share, rows, sizes)
    if not args.quick:  # a tiny model's frames are mostly heads
        keep, taken = quarter_of(piece)
        found["int8_quarter_ratio"] = round(taken / sizes["bf16", 1.0], 4)
        found["int8_quarter_tokens"] = round(keep / piece.tokens, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sender", default=SENDER)
    parser.add_argument("--receiver", default=RECEIVER)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens of text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny random models")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.answer = ANSWER
    torch.set_num_threads(args.threads)
    if args.quick:
        args.sender, args.receiver = "tiny:llama", "tiny:qwen3"
    if args.serve:
        serve(args)
        return
    found = measure(args)
    print(tables(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

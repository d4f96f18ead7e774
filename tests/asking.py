"""A receiver asked among tiny senders, and the ways in which a sender can be wrong."""

from __future__ import annotations

import itertools
import time

import torch

from fedloom.refining import Request, Sender, Terms, export, local, refine
from fedloom.slices.slice import export_cache

from rooms import alone, fuser_of, room

PROMPT, TOKENS = "what is it?", 6
OTHERS = ("llama", "qwen2", "gemma3")
QUICK = Terms(deadline=20.0)


def receiver():
    return room("qwen3")[0]


def standing():
    return alone(receiver(), receiver().tokenizer.encode(PROMPT), TOKENS)[1]


def sender(family: str, ask=None, fuser=None) -> Sender:
    base, geometry = room(family)
    made = local(base, geometry, fuser or fuser_of(family, "qwen3"), family)
    return made if ask is None else Sender(geometry, ask, made.fuser, family)


def asked(senders, terms=QUICK, **told):
    return refine(receiver(), PROMPT, senders, terms=terms, max_new_tokens=TOKENS, stop=(), **told)


def frames(family: str, request: Request) -> list[bytes]:
    return list(export(*room(family), request))


def lost(answer) -> dict[str, str]:
    return {s.name: s.cause for s in answer.receipt.sources if s.status == "fallback"}


def broken(what: str):
    """Ways in which a sender can be wrong; each must cost the answer this sender and no more."""
    old: list[list[bytes]] = []

    def ask(request: Request):
        sent = frames("llama", request)
        if what == "mutated":
            sent[1] = sent[1][:60] + bytes([sent[1][60] ^ 1]) + sent[1][61:]
        elif what == "oversized":
            sent[1] = sent[1][:28] + b"\xff\xff\xff\x7f" + sent[1][32:]
        elif what == "truncated":
            sent = sent[:-1]
        elif what == "replayed":
            old.append(sent)
            sent = old[0]
        elif what == "noise":
            sent = [b"\x00" * 100_000]
        elif what == "sleeps":
            time.sleep(2)
        elif what == "raises":
            raise OSError("the line is dead")
        elif what == "dies midway":
            return itertools.chain(sent[:2], (bytes(1 // n) for n in [0]))
        elif what == "nan":
            base, geometry = room("llama")
            piece = export_cache(base.model, geometry, base.tokenizer.encode(request.text))
            piece.keys[0][0, 0, 0] = torch.nan
            return piece
        elif what == "another model":
            return frames("qwen2", request)
        elif what == "no bytes":
            return [17]
        return sent

    return ask

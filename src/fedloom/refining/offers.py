# SPDX-License-Identifier: Apache-2.0
"""``decide``: from senders that are there and what was measured of them to whom to ask, and how.

The arithmetic is ``select``'s; here its candidates are put together: bytes from geometries and from
the layers that the fuser looks at, memory from the fuser, the rest from ``fedloom.gains``.  Who has
no fuser, or one that is shut, can still be asked for text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedloom.errors import Refusal
from fedloom.gains import Gains, Help, is_named
from fedloom.models.base import Base
from fedloom.refining.refine import Terms, measured
from fedloom.refining.selection import ANY, TEXT, Budget, Candidate, cache_ways, select
from fedloom.refining.sources import Sender
from fedloom.slices.fitting import fitting
from fedloom.slices.geometry import Geometry

Log = dict[str, Any]
"""What stands in a receipt: inputs, estimates, and why each was taken or left; JSON as it is."""
_WIDE = 4  # bytes of a slot's number at the receiver, at most: weights may be narrower


def decide(
    gains: Gains,
    receiver: Base,
    senders: Sequence[Sender],
    *,
    tokens: int,
    terms: Terms,
    task: str = ANY,
    privacy: int = 0,
) -> Log:
    """Choose among senders for a question; nobody is asked yet.

    Parameters
    ----------
    tokens
        Of what senders read, by the receiver's tokenizer.
    terms
        Its deadline and its share of tokens count; its scheme does not, for that is chosen.

    Raises
    ------
    Refusal
        If two senders have one name, or text competes with residual fusers, which read the same
        text on both sides.
    """
    names = [sender.name for sender in senders]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Refusal(f"sender {twice[0]} comes twice: give it once")
    into, candidates, apart = measured(receiver), list[Candidate](), list[Log]()
    for sender in senders:
        found, why = _offers(gains, receiver, into, sender, tokens, terms)
        candidates += found
        apart += [_left(sender.name, way, reason) for way, reason in why.items()]
    if any(c.way == TEXT for c in candidates) and any(_residual(sender) for sender in senders):
        raise Refusal(
            "text is offered beside a residual fuser, whose models must both read the same text:"
            ' leave way = "text" out of the gains, or take prefix fusers'
        )
    decision = select(candidates, _budget(gains, senders, tokens, terms, privacy), task)
    rows = decision.log["candidates"]
    return {
        **decision.log,
        "candidates": [*rows[:-1], *apart, rows[-1]],  # no help stays the last
        "share": terms.share,
        "part": terms.part,
        "message_tokens": gains.message_tokens,
        "way": decision.way,
        "chosen": {c.sender: c.way for c in decision.chosen},
        "value": decision.value,
        "seconds": decision.seconds,
        "bytes": decision.nbytes,
    }


def _residual(sender: Sender) -> bool:
    return sender.fuser is not None and sender.fuser.config.mode == "residual"


def _budget(
    gains: Gains, senders: Sequence[Sender], tokens: int, terms: Terms, privacy: int
) -> Budget:
    def link(told: Mapping[str, float], by: float) -> dict[str, float]:
        found = {ANY: by * told[ANY]} if ANY in told else {}
        for sender in senders:
            for name, x in told.items():
                if is_named(name, *_model(sender)):
                    found[sender.name] = by * x
        return found

    return Budget(
        tokens=tokens,
        bandwidth=link(gains.mbit, 1e6),
        rtt=link(gains.rtt, 1.0),
        deadline=terms.deadline,
        own_seconds=gains.own_seconds,
        memory=gains.memory,
        privacy=privacy,
        cautious=gains.cautious,
        senders=gains.senders,
    )


def _model(sender: Sender) -> tuple[str, str]:
    return sender.source or sender.name, sender.geometry.model


def _offers(
    gains: Gains, receiver: Base, into: Geometry, sender: Sender, tokens: int, terms: Terms
) -> tuple[list[Candidate], dict[str, str]]:
    """Return a sender's candidates, and way by way why others are none."""
    rows = gains.of((str(receiver.source), into.model), _model(sender))
    if not rows:
        return [], {ANY: "nothing was measured of it"}
    found, why, unfit = list[Candidate](), dict[str, str](), _unfit(sender, into)
    if twice := [row.way for row in rows if [r.way for r in rows].count(row.way) > 1]:
        raise Refusal(f"gains of {sender.name} come twice by {twice[0]}: name each pair once")
    for row in rows:
        if row.way == TEXT:
            found.append(_text(sender, row))
        elif unfit:
            why[row.way] = unfit
        else:
            try:
                found.append(_cache(sender, into, row, tokens, terms))
            except Refusal as error:  # not two tokens fit
                why[row.way] = str(error)
    return found, why


def _unfit(sender: Sender, into: Geometry) -> str:
    if sender.fuser is None:
        return "" if sender.geometry == into else "no fuser for this pair"
    return "" if sender.fuser.open_layers() else "all gates of its fuser are shut"


def _text(sender: Sender, row: Help) -> Candidate:
    return Candidate(
        sender=sender.name,
        way=TEXT,
        gains=row.gains,
        token_bytes=0.0,
        fixed_bytes=row.nbytes,
        prefill=row.prefill,
        fuse=row.fuse,
        decode_seconds=row.decode_seconds,
        memory=row.memory or 0.0,
        trust=row.trust,
    )


def _cache(sender: Sender, into: Geometry, row: Help, tokens: int, terms: Terms) -> Candidate:
    fuser, of, share = sender.fuser, sender.geometry, terms.share
    layers = len(fuser.sender_layers) if fuser else into.layers
    if terms.part:
        share = min(share, fitting(of, range(layers), tokens, row.way, terms.part) / tokens)
    memory = _memory(sender, into, share * tokens) if row.memory is None else row.memory
    (made,) = cache_ways(
        sender.name,
        {row.way: row.gains},
        layers=layers,
        heads=of.heads,
        dim=of.dim,
        prefill=row.prefill,
        fuse=row.fuse / share,  # of the tokens that the sender reads, this share is fused
        memory=memory,
        trust=row.trust,
    )
    return replace(made, token_bytes=share * made.token_bytes)


def _memory(sender: Sender, into: Geometry, slots: float) -> float:
    """Count the bytes of a fuser and of the slots that it makes."""
    fuser = sender.fuser
    held = [*fuser.parameters(), *fuser.buffers()] if fuser else []
    layers = len(fuser.open_layers()) if fuser else into.layers
    own = sum(x.numel() * x.element_size() for x in held)
    return own + slots * layers * 2 * into.heads * into.dim * _WIDE


def _left(sender: str, way: str, why: str) -> Log:
    return {"sender": sender, "way": way, "taken": False, "why": why}

# SPDX-License-Identifier: Apache-2.0
"""``refine``: one answer with the help of whoever answers in time (FedRefine, arXiv 2603.28772).

Senders are asked at once, looked at one by one, and left out for what is wrong with them; the
answer is given with those who remain: fewer of them, a sender's words (a hook), or the receiver
alone.  A receipt says which it was.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, MutableSet, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.adapters.fuser import FuserConfig, Guests
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.models.offsets import token_ends
from fedloom.refining.answer import Refinement, among, guests_of, prefixed
from fedloom.refining.guards import calmed, divergence, norm_of, voted_out
from fedloom.refining.receipt import (
    LOST,
    SHUT,
    STANDALONE,
    T2T,
    USED,
    Receipt,
    SourceReceipt,
    kind_of_fallback,
)
from fedloom.refining.sources import Arrival, Request, Sender, gather
from fedloom.refining.terms import Terms as Terms
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.slice import CacheSlice

Words = Callable[[float, Sequence[Sender]], Sequence[int] | None]
"""Text in place of caches: given the seconds left and whose caches fell away (who fell to a guard
is not among them), a prompt that holds their words."""


@dataclass(frozen=True)
class Answer:
    """What came of it.

    Attributes
    ----------
    ids : list of int
        New tokens, the one that stopped it included.
    text : str
        The same in words.
    logits : Tensor
        After the prompt, [V].
    receipt : Receipt
    """

    ids: list[int]
    text: str
    logits: Tensor
    receipt: Receipt


@dataclass
class _Seat:
    """A sender on its way into the answer."""

    sender: Sender
    receipt: SourceReceipt
    piece: CacheSlice | None = None
    guests: Guests | None = None

    @property
    def mode(self) -> str:
        return self.sender.fuser.config.mode if self.sender.fuser else "prefix"

    def lose(self, cause: str, reason: str) -> None:
        self.receipt = replace(self.receipt, status=LOST, cause=cause, reason=reason)
        self.piece = self.guests = None

    @property
    def heard(self) -> bool:
        return self.receipt.status == USED

    @property
    def fallen(self) -> bool:
        return self.receipt.status == LOST and self.receipt.cause != "guard"


@functools.lru_cache(maxsize=16)
def measured(base: Base) -> Geometry:
    """Return a model's geometry, measured once."""
    return geometry_of(base.model, base.base_hash, base.tokenizer_hash)


class _Desk:
    """One request: its senders, and the clock of each stage."""

    def __init__(
        self, receiver: Base, ids: Sequence[int], ends: Sequence[int], senders: Sequence[Sender]
    ) -> None:
        self.receiver, self.geometry = receiver, measured(receiver)
        self.ids, self.ends = ids, ends
        ordered = sorted(senders, key=lambda s: (s.geometry.model, s.name))
        self.seats = [self._admit(sender) for sender in ordered]
        self.how = self._one_kind()
        self.mode = self.how.mode
        self.seconds: dict[str, float] = {}
        self.guards: dict[str, float] = {}

    def _admit(self, sender: Sender) -> _Seat:
        fuser, told = sender.fuser, SourceReceipt(model=sender.geometry.model, name=sender.name)
        seat = _Seat(sender, told)
        if fuser is None:
            if sender.geometry != self.geometry:
                seat.lose("no-fuser", "no fuser for this pair: train one, or give its file")
            elif not self.geometry.full:
                seat.lose("unfit", "every layer of the receiver slides a window: none keeps it")
            return seat
        if (fuser.sender, fuser.receiver) != (sender.geometry, self.geometry):
            seat.lose("no-fuser", "its fuser belongs to another pair")
            return seat
        fuser.to(self.receiver.model.device)
        opened = len(fuser.open_layers())
        status = USED if opened else SHUT  # nobody hears it, so nobody asks it
        seat.receipt = replace(told, status=status, gates_open=opened, gates=len(fuser.layers))
        return seat

    def _one_kind(self) -> FuserConfig:
        """Leave out whose fuser wants the prompt read in another way than most, or than the first.

        The receiver's own model has no fuser and goes with any prefixes.
        """
        configs = [seat.sender.fuser.config for seat in self.heard if seat.sender.fuser]
        kinds = [_kind(config) for config in configs]
        most = max(kinds, key=kinds.count, default=_kind(FuserConfig()))
        for seat in self.heard:
            fuser = seat.sender.fuser
            if (most[0] != "prefix") if fuser is None else (_kind(fuser.config) != most):
                how = "mode {}, tail {}, sink {}".format(*most)
                seat.lose("unfit", f"the others' fusers are heard in another way: {how}")
        return next((c for c in configs if _kind(c) == most), FuserConfig())

    @property
    def heard(self) -> list[_Seat]:
        return [seat for seat in self.seats if seat.heard]

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    def collect(self, shown: str, terms: Terms, used: MutableSet[bytes] | None) -> None:
        """Ask all and keep what came whole."""
        asked = self.heard
        requests = [self._request(seat, shown, terms) for seat in asked]
        senders = [seat.sender for seat in asked]
        with self.clock("wait"):
            arrivals = gather(
                senders,
                requests,
                deadline=terms.deadline,
                max_bytes=terms.max_bytes,
                used=used,
            )
        with self.clock("fuse"):
            for seat, arrival in zip(asked, arrivals, strict=True):
                self._take(seat, arrival, terms)

    def _request(self, seat: _Seat, shown: str, terms: Terms) -> Request:
        fuser = seat.sender.fuser
        layers = fuser.sender_layers if fuser else tuple(range(self.geometry.layers))
        tag = seat.sender.tag
        return Request(
            **({"key": tag[0], "session": tag[1]} if tag else {}),
            text=shown,
            layers=layers,
            scheme=seat.sender.scheme or terms.scheme,
            share=terms.share,
            by=terms.by,
            part=terms.part,
            ends=seat.mode == "residual",
            max_tokens=terms.max_tokens,
        )

    def _take(self, seat: _Seat, came: Arrival, terms: Terms) -> None:
        seat.receipt = replace(
            seat.receipt,
            way=seat.sender.scheme or terms.scheme,
            bytes=came.bytes,
            seconds=came.seconds,
            digest=came.digest,
            early=came.early,
        )
        if came.piece is None:
            seat.lose(came.cause, came.reason)
            return
        seat.piece = came.piece
        norm = norm_of(seat.sender.fuser, came.piece)
        seat.receipt = replace(seat.receipt, tokens=came.piece.tokens, norm=norm)
        if terms.max_norm and norm is not None and not norm <= terms.max_norm:
            seat.lose("guard", f"its cache is {norm:.3g} in size, at most {terms.max_norm:g}")
        elif self.mode == "prefix":
            try:
                seat.guests = guests_of(seat.sender.fuser, came.piece, came.made)
            except Refusal as error:
                seat.lose("integrity", str(error))
                return
            parts = (seat.guests.keys, seat.guests.values)
            if not all(x.isfinite().all() for part in parts for x in part.values()):
                seat.lose("not-finite", "its fuser makes values that are not finite of it")

    def hear(self, late: Callable[[], str] | None) -> None:
        """Put another prompt in the place of the one that was there."""
        if late is None:
            return
        if self.mode == "residual":
            raise ValueError("a residual fuser aligns two readings of one text: none may come late")
        with self.clock("words"):
            self.ids = self.receiver.tokenizer.encode(late())

    def read(self, seats: Sequence[_Seat]) -> Refinement:
        """Read the prompt among some."""
        if self.mode == "prefix":
            guests = [s.guests for s in seats if s.guests]
            return among(self.receiver, self.geometry, self.ids, guests, self.how)
        sources = [(s.sender.fuser, s.piece) for s in seats if s.piece]
        return prefixed(self.receiver, self.geometry, self.ids, sources, ends=self.ends)

    def settled(self) -> Refinement:
        """Read the prompt among all who came; leave out, from the last, with whom that fails."""
        while True:
            try:
                return self.read(self.heard)
            except Refusal as error:
                if not self.heard:
                    raise
                self.heard[-1].lose("unfit", f"the receiver cannot read with it: {error}")

    def last(self, seats: Sequence[_Seat]) -> Tensor:
        """Return the next-token logits among some, [V]."""
        return self.read(seats).logits[-1]

    def watch(self, made: Refinement, terms: Terms) -> Refinement:
        """Let the guards look at an answer; read again without those whom they leave out."""
        made = self._finite(made)
        if terms.vote and (out := voted_out(self.heard, self.last)) is not None:
            out.lose("guard", "it alone decides the next token against all others")
            self.guards["voted-out"] = 1.0
            made = self.read(self.heard)
        if terms.max_kl and self.heard:
            before, alone = self.heard, self.last([])
            self.guards["kl-before"] = divergence(made.logits[-1], alone)
            kept, self.guards["kl"] = calmed(before, alone, self.last, terms.max_kl)
            for seat in before:
                if not any(seat is other for other in kept):
                    seat.lose("guard", f"with it the answer is more than {terms.max_kl:g} nats off")
            made = self.read(self.heard) if len(kept) < len(before) else made
        return made

    def _finite(self, made: Refinement) -> Refinement:
        if made.logits[-1].isfinite().all() or not self.heard:
            return made
        for seat in self.heard:
            if not self.last([seat]).isfinite().all():
                seat.lose("not-finite", "the receiver's logits are not finite with it")
        made = self.read(self.heard)
        if not made.logits[-1].isfinite().all():
            for seat in self.heard:
                seat.lose("not-finite", "the receiver's logits are not finite with all of them")
            made = self.read([])
        return made


def _kind(config: FuserConfig) -> tuple[str, int, str]:
    """Return what must be equal of fusers that are heard together."""
    return config.mode, config.tail, config.sink


@torch.no_grad()
def refine(
    receiver: Base,
    prompt: str,
    senders: Sequence[Sender],
    *,
    shown: str | None = None,
    terms: Terms | None = None,
    max_new_tokens: int = 64,
    stop: Collection[int] | None = None,
    words: Words | None = None,
    late: Callable[[], str] | None = None,
    then: Callable[[Refinement], None] | None = None,
    used: MutableSet[bytes] | None = None,
) -> Answer:
    """Answer a prompt with what senders make of it.

    Whoever is too late, broken, wrong or beyond a guard is left out; the receipt says who and why.
    With nobody left, or nobody asked, the answer is the receiver's own, token for token.

    Parameters
    ----------
    prompt
        The receiver's own, as it is read: no template is put around it.
    shown
        What senders read in its place, such as the same in other words; they see it in clear.
    stop
        Tokens that end the answer; by default the tokenizer's end of text.
    words
        Tried when every sender has fallen away; see ``fallback.refine_or_ask``.
    late
        Asked once caches have come or not: a prompt with others' words; not for residual fusers.
    then
        Shown the receiver when it has read its prompt among those who were heard, before it writes.
    used
        Sessions that were had before: a frame of one of them is not believed.

    Raises
    ------
    Refusal
        If the prompt is empty; never for a sender's fault.
    """
    began, terms = time.perf_counter(), terms or Terms()
    tokenizer = receiver.tokenizer
    residual = any(s.fuser and s.fuser.config.mode == "residual" for s in senders)
    ids, ends = token_ends(tokenizer, prompt) if residual else (tokenizer.encode(prompt), [])
    if not ids:
        raise Refusal("an empty prompt has no next token: give the receiver at least one")
    desk = _Desk(receiver, ids, ends, senders)
    desk.collect(prompt if shown is None else shown, terms, used)
    desk.hear(late)
    with desk.clock("prefill"):
        made = desk.settled()
    with desk.clock("guard"):
        made = desk.watch(made, terms)
    if then is not None:
        then(made)
    mode = desk.mode if desk.heard else STANDALONE
    fallen = [seat.sender for seat in desk.seats if seat.fallen]
    if mode == STANDALONE and words is not None and fallen:
        with desk.clock("words"):
            said = words(max(0.0, began + terms.deadline - time.perf_counter()), fallen)
            if said:
                desk.ids = said
                made, mode = among(receiver, desk.geometry, said, []), T2T
    with desk.clock("decode"):
        ends_at = {tokenizer.eos_token_id} if stop is None else stop
        new = made.generate(max_new_tokens, ends_at)
    desk.seconds["total"] = time.perf_counter() - began
    sources = tuple(seat.receipt for seat in desk.seats)
    receipt = Receipt(
        mode=mode,
        fallback=kind_of_fallback(sources, mode),
        sources=sources,
        seconds=desk.seconds,
        guards=desk.guards,
        prompt_tokens=len(desk.ids),
        new_tokens=len(new),
    )
    text = tokenizer.decode([i for i in new if i not in ends_at])
    return Answer(new, text, made.logits[-1], receipt)

# SPDX-License-Identifier: Apache-2.0
"""Senders as callables: each is asked in a thread of its own, and none is waited for too long.

A source returns frames or, within one process, a slice; where these come from (another model in
this process, a message that has come, a socket) is its own affair.  Whatever goes wrong with one
is its reason to be left out and never an exception of the answer.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from dataclasses import dataclass, field

from fedloom.adapters.fuser import CacheFuser, Pair
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.models.offsets import token_ends
from fedloom.refining.inflight import InFlight
from fedloom.refining.text import Written, background
from fedloom.slices.fitting import fitting
from fedloom.slices.frames import encode
from fedloom.slices.geometry import Geometry
from fedloom.slices.reading import FrameError, FrameReader, Truncated
from fedloom.slices.slice import CacheSlice, export_cache

_LEAST = 2  # tokens: the sink and one more


class SourceLost(RuntimeError):
    """Raised by a source that knows why there is nothing; ``cause`` is one of a receipt's."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a sender is asked for.

    Attributes
    ----------
    text : str
        What it reads; it sees this in clear.
    layers : tuple of int
        Those that the fuser looks at.
    scheme : str
        ``bf16``, ``int8`` or ``int4``.
    share, by
        The share of tokens to keep, and which: ``last`` or ``value-norm``.
    part : float
        Of the context's plain 16-bit bytes, what the slice may take on the wire, hence fewer
        tokens; 0 does not look.
    ends : bool
        Whether the tokens' ends in the text are wanted, as residual fusion needs them.
    max_tokens : int
        A longer text is refused before it is read.
    key, session : bytes
        For the frames' hashes; drawn by the receiver for this request.
    """

    text: str
    layers: tuple[int, ...]
    scheme: str = "bf16"
    share: float = 1.0
    by: str = "last"
    part: float = 0.0
    ends: bool = False
    max_tokens: int = 4096
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    session: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)


Ask = Callable[[Request], CacheSlice | Iterable[bytes]]
Tell = Callable[[str, int, float], Written]


@dataclass(frozen=True)
class Sender:
    """Someone who may be asked.

    Attributes
    ----------
    geometry : Geometry
        The registered one; frames of another model are not believed.
    ask : callable
        Takes a ``Request``.
    fuser : CacheFuser or None
        Of this pair; none is needed for the receiver's own model.
    name : str
        For people.
    tag : tuple of bytes, optional
        Key and session of frames that were asked for before; else each request draws its own.
    source : str
        Its model, as measurements name it; by default the name.
    scheme : str
        How its cache travels; by default as the terms say.
    tell : callable, optional
        Writes a message on a question (T2T), within so many tokens and seconds.
    """

    geometry: Geometry
    ask: Ask
    fuser: CacheFuser | None = None
    name: str = ""
    tag: tuple[bytes, bytes] | None = None
    source: str = ""
    scheme: str = ""
    tell: Tell | None = None


@dataclass
class Arrival:
    """What has come of one sender: a slice and what is made of it, or why there is none."""

    piece: CacheSlice | None = None
    cause: str = ""
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0
    digest: str = ""
    made: dict[int, Pair] = field(default_factory=dict)
    early: int = 0


def export(base: Base, geometry: Geometry, request: Request) -> Iterator[bytes]:
    """Do a sender's part: read the text natively, return the slice as frames."""
    yield from encode(_slice(base, geometry, request), request.scheme, request.key, request.session)


def _slice(base: Base, geometry: Geometry, request: Request) -> CacheSlice:
    if request.ends:
        ids, ends = token_ends(base.tokenizer, request.text)
    else:
        ids, ends = base.tokenizer.encode(request.text), []
    if len(ids) > request.max_tokens:
        raise Refusal(f"a text of {len(ids)} tokens: at most {request.max_tokens} are read")
    if not 0 < request.share <= 1:
        raise Refusal(f"a share of {request.share} tokens: expected above 0 and at most 1")
    keep = max(math.ceil(request.share * len(ids)), min(_LEAST, len(ids)))
    if request.part:
        room = (len(ids), request.scheme, request.part, ends)
        keep = min(keep, fitting(geometry, set(request.layers), *room))
    return export_cache(
        base.model, geometry, ids, layers=request.layers, keep=keep, by=request.by, ends=ends
    )


def local(
    base: Base, geometry: Geometry, fuser: CacheFuser | None = None, name: str = ""
) -> Sender:
    """Make a sender of a model in this process; its slices go through frames as on a wire."""
    return Sender(
        geometry,
        lambda request: export(base, geometry, request),
        fuser,
        name or str(base.source),
        source=str(base.source),
        tell=lambda text, tokens, seconds: background(base, text, tokens, seconds=seconds),
    )


def gather(
    senders: Sequence[Sender],
    requests: Sequence[Request],
    *,
    deadline: float,
    max_bytes: int = 1 << 28,
    used: MutableSet[bytes] | None = None,
) -> list[Arrival]:
    """Ask all at once and return what has come when all have answered or the time is up.

    Parameters
    ----------
    deadline
        Seconds, from now; who is not done by then is left to finish for nobody. What is projected
        while more is on its way counts.
    used
        Sessions that were had before; see ``FrameReader``.
    """
    began = time.monotonic()
    asked = [_Asked(s, r, max_bytes, used) for s, r in zip(senders, requests, strict=True)]
    for each in asked:
        each.start()
    for each in asked:
        each.done.wait(max(0.0, began + deadline - time.monotonic()))
    return [each.take(deadline) for each in asked]


class _Asked(threading.Thread):
    """One sender at work; a daemon, so that one who never answers holds up no exit."""

    def __init__(
        self, sender: Sender, request: Request, max_bytes: int, used: MutableSet[bytes] | None
    ) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self._sender, self._request = sender, request
        self._max_bytes, self._used = max_bytes, used
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._arrival: Arrival | None = None
        self._given_up = False

    def run(self) -> None:
        arrival = Arrival()
        try:
            arrival = self._receive()
        except Truncated as error:
            arrival = Arrival(cause="gone", reason=_line(error))
        except FrameError as error:
            arrival = Arrival(cause="integrity", reason=_line(error))
        except SourceLost as error:
            arrival = Arrival(cause=error.cause, reason=_line(error))
        except Refusal as error:
            arrival = Arrival(cause="failed", reason=_line(error))
        except Exception as error:  # a sender's fault is no fault of the answer
            arrival = Arrival(cause="failed", reason=_line(error, type(error).__name__))
        with self._lock:
            arrival.seconds = time.monotonic() - self._began
            self._arrival = arrival
        self.done.set()

    def take(self, deadline: float) -> Arrival:
        with self._lock:
            self._given_up = self._arrival is None
            late = f"no whole answer within {deadline:g} s"
            return self._arrival or Arrival(cause="deadline", reason=late, seconds=deadline)

    def _receive(self) -> Arrival:
        geometry, request = self._sender.geometry, self._request
        came = self._sender.ask(request)
        if isinstance(came, CacheSlice):
            _check(came, geometry, request.max_tokens)
            _check_asked(came, request)
            return Arrival(came)
        reader = FrameReader(
            geometry,
            request.key,
            request.session,
            max_tokens=request.max_tokens,
            max_bytes=self._max_bytes,
            used=self._used,
        )
        flight = InFlight(self._sender.fuser)
        for data in came:
            if self._given_up:
                break
            flight.take(reader.feed(data), ended=bool(reader.digest))
        piece = reader.finish()  # or all that was made is dropped with the stream
        _check_asked(piece, request)
        return Arrival(
            piece,
            bytes=reader.nbytes,
            digest=reader.digest,
            made=flight.made,
            early=flight.early,
        )


def _check(piece: CacheSlice, geometry: Geometry, most: int) -> None:
    """Hold a slice that came as it is to what the reader of frames holds them to."""
    if piece.geometry != geometry:
        raise FrameError(
            f"wrong model: {piece.geometry.model[:12]} came, {geometry.model[:12]} was asked"
        )
    if not 0 < piece.tokens <= most:
        raise FrameError(f"a slice of {piece.tokens} tokens: expected 1 to {most}")
    if piece.keys.keys() != piece.values.keys() or piece.keys.keys() - set(range(geometry.layers)):
        raise FrameError(f"layers {piece.layers}: expected keys and values of the model's own")
    shape = (geometry.heads, piece.tokens, geometry.dim)
    for part in (piece.keys, piece.values):
        for layer, x in part.items():
            if tuple(x.shape) != shape or not x.is_floating_point():
                raise FrameError(f"layer {layer} is {tuple(x.shape)}: expected floats {shape}")
            if not x.isfinite().all():
                raise FrameError("the slice holds a value that is not finite")


def _check_asked(piece: CacheSlice, request: Request) -> None:
    """See that all came that was asked for, whichever way it came."""
    if missing := set(request.layers) - set(piece.layers):
        raise FrameError(f"layer {min(missing)} was asked for and did not come")
    if request.ends and len(piece.ends) != piece.tokens:
        raise FrameError(
            f"{len(piece.ends)} ends for {piece.tokens} tokens: where each ends was asked for"
        )


def _line(error: Exception, kind: str = "") -> str:
    said = " ".join(str(error).split())[:200]
    return f"{kind}: {said}" if kind else said

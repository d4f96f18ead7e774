# SPDX-License-Identifier: Apache-2.0
"""``Receipt``: what an answer was made of, what it cost, and what fell away.

It names models by hash and says nothing of any text, so it may be kept and shown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

USED, SHUT, LOST = "used", "shut", "fallback"
"""A sender was heard; all its gates are shut, so it was not asked; it fell away."""
CAUSES = (
    "no-fuser",
    "unfit",
    "deadline",
    "gone",
    "failed",
    "integrity",
    "not-finite",
    "guard",
)
"""Why a sender falls away."""
FEWER, T2T, STANDALONE = "fewer", "t2t", "standalone"
"""What the answer then rests on: the other senders, a sender's words, the receiver alone."""


@dataclass(frozen=True, kw_only=True)
class SourceReceipt:
    """One sender's part in an answer.

    Attributes
    ----------
    model, name : str
        Its hash, and what people call it.
    status : str
        ``used``, ``shut`` or ``fallback``.
    cause, reason : str
        For a fallback: one of ``CAUSES``, and a sentence.
    way : str
        How it was heard: ``bf16``, ``int8``, ``int4``, or ``text`` for its message in words.
    gates_open, gates : int
        Receiver layers that listen, of those that could.
    tokens, bytes : int
        Of the slice that came; bytes as they were on the wire.
    norm : float or None
        Root mean square of its keys or values, whichever is larger, in standard deviations of what
        the fuser was calibrated on.
    digest : str
        Hash over all that came, to be looked up later.
    early : int
        Of the receiver's layers, those that were projected before the end of the stream had come.
    """

    model: str
    name: str = ""
    status: str = USED
    cause: str = ""
    reason: str = ""
    way: str = ""
    gates_open: int = 0
    gates: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    norm: float | None = None
    digest: str = ""
    early: int = 0


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """All of it.

    Attributes
    ----------
    mode : str
        How the answer was made in the end: ``prefix``, ``residual``, ``t2t`` or ``standalone``.
    fallback : str
        Empty if no sender fell away, else ``fewer``, ``t2t`` or ``standalone``.
    seconds : mapping
        ``wait`` for senders, ``fuse``, ``prefill``, ``guard``, ``decode`` and ``total``.
    guards : mapping
        What the guards measured: ``kl`` in nats, ``voted-out``.
    prompt_tokens, new_tokens : int
        Of the receiver.
    selection : dict, optional
        What was looked at when senders were chosen, and who was left for what reason.
    rephrasing : dict, optional
        In private mode: whether the question was ``rephrased``, after how many ``retries``, or
        stayed at home (``standalone``), and how many entities were ``removed``.
    """

    mode: str
    fallback: str
    sources: tuple[SourceReceipt, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    guards: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    selection: dict[str, Any] | None = None
    rephrasing: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all slices."""
        return sum(source.bytes for source in self.sources)

    def count(self, status: str) -> int:
        """Count senders of a status."""
        return sum(source.status == status for source in self.sources)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        tree = asdict(self)
        return {**tree, "sources": list(tree["sources"]), "bytes": self.bytes}


def kind_of_fallback(sources: tuple[SourceReceipt, ...], mode: str) -> str:
    """Say what an answer rests on if senders fell away.

    >>> kind_of_fallback((SourceReceipt(model="a", status="fallback"),), "standalone")
    'standalone'
    >>> kind_of_fallback((SourceReceipt(model="a"),), "prefix")
    ''
    """
    if not any(source.status == LOST for source in sources):
        return ""
    return mode if mode in (T2T, STANDALONE) else FEWER

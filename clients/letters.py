# SPDX-License-Identifier: Apache-2.0
"""What FedRefine's nodes write to each other under seal: questions, and what was made of them.

A letter asks for caches in one precision, or for messages in words (T2T); its answers are numbered
as its questions and look alike from outside: sealed bytes, whose length alone tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.config import RefineConfig
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.refining import Request, Sender, Written, background, export, measured
from fedloom.refining.selection import NONE as NONE
from fedloom.refining.selection import TEXT as TEXT
from fedloom.secure.channel import Channel, session_of
from fedloom.slices.geometry import Geometry
from fedloom.slices.reading import FrameError

Arrays = dict[str, NDArray[Any]]
Tapped = list[tuple[str, bytes]]
UNASKED = "unasked"
"""Why nothing came of a sender that was not chosen: no fallback."""
_MOST = 4096  # questions in one message
_LONGEST = 1024  # tokens of a message in words


def cache_letter(
    given: RefineConfig,
    texts: Sequence[str],
    sender: Sender,
    scheme: str,
    sessions: Sequence[bytes],
) -> bytes:
    """Ask for a slice of the cache of each text."""
    fuser, layers = sender.fuser, range(sender.geometry.layers)
    body = {
        "texts": list(texts),
        "layers": list(fuser.sender_layers if fuser else layers),
        "scheme": scheme,
        "share": given.keep,
        "part": given.keep_bytes,
        "ends": fuser is not None and fuser.config.mode == "residual",
        "sessions": [session.hex() for session in sessions],
    }
    return json.dumps(body).encode()


def words_letter(texts: Sequence[str], tokens: int) -> bytes:
    """Ask for a message on each text, of so many tokens at most."""
    return json.dumps({"texts": list(texts), "scheme": TEXT, "tokens": tokens}).encode()


def sessions_of(nonce: bytes, asked: int, count: int) -> list[bytes]:
    """Derive the sessions of so many questions to one sender."""
    return [session_of(nonce, asked, number) for number in range(count)]


def why_not(sender: Sender, way: str, own: Geometry) -> str:
    """Say why a sender is not asked, or nothing if it is."""
    if way in (NONE, TEXT):
        return UNASKED if way == NONE else ""
    if sender.fuser is None:
        return "" if sender.geometry == own else "no-fuser"
    return "" if sender.fuser.open_layers() else "shut"


def answered(
    letter: bytes, base: Base, channel: Channel, max_tokens: int, tapped: Tapped | None = None
) -> Arrays:
    """Do what a letter asks for, and seal it question by question.

    Parameters
    ----------
    tapped
        Takes each text with the frames that were made of it, as a line has them before any seal.
    """
    body = json.loads(letter)
    texts = [str(text) for text in body["texts"]]
    if len(texts) > _MOST:
        raise Refusal(f"{len(texts)} questions in a letter: at most {_MOST}")
    made = _words(body, texts, base, max_tokens)
    if made is None:
        made = _caches(body, texts, base, channel, max_tokens)
        if tapped is not None:
            tapped += zip(texts, made, strict=True)
    sealed = [channel.seal("cache", data, number) for number, data in enumerate(made)]
    return {f"{number:04d}": np.frombuffer(data, np.uint8) for number, data in enumerate(sealed)}


def _caches(
    body: Mapping[str, Any], texts: Sequence[str], base: Base, channel: Channel, max_tokens: int
) -> list[bytes]:
    sessions = body["sessions"]
    if len(sessions) != len(texts):
        raise Refusal(f"{len(texts)} questions and {len(sessions)} sessions: expected as many")
    found = []
    for text, session in zip(texts, sessions, strict=True):
        request = Request(
            text=text,
            layers=tuple(map(int, body["layers"])),
            scheme=str(body["scheme"]),
            share=float(body["share"]),
            part=float(body["part"]),
            ends=bool(body["ends"]),
            max_tokens=max_tokens,
            key=channel.frame_key,
            session=bytes.fromhex(session),
        )
        found.append(b"".join(export(base, measured(base), request)))
    return found


def _words(
    body: Mapping[str, Any], texts: Sequence[str], base: Base, max_tokens: int
) -> list[bytes] | None:
    """Write on each text; nothing if the letter asks for caches."""
    if body["scheme"] != TEXT:
        return None
    tokens = int(body["tokens"])
    if not 0 < tokens <= _LONGEST:
        raise Refusal(f"messages of {tokens} tokens: expected 1 to {_LONGEST}")
    found = []
    for text in texts:
        if (length := len(base.tokenizer.encode(text))) > max_tokens:
            raise Refusal(f"a text of {length} tokens: at most {max_tokens} are read")
        made = background(base, text, tokens)
        told = {"text": made.text, "tokens": made.tokens, "seconds": made.seconds}
        found.append(json.dumps(told).encode())
    return found


def message_of(opened: bytes, model: str) -> Written:
    """Read a message; what a sender says of itself is compared, not trusted.

    Raises
    ------
    FrameError
        If it is none.
    """
    try:
        told = json.loads(opened)
        text, tokens, seconds = str(told["text"]), int(told["tokens"]), float(told["seconds"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FrameError("a sealed message that is none") from error
    return Written(model, text, min(max(tokens, 0), _LONGEST), len(text.encode()), max(seconds, 0))

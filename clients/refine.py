# SPDX-License-Identifier: Apache-2.0
"""FedRefine's local work: read for others, and answer among what others have read.

Nothing is trained.  The method's own exception to what may leave a node: a question's text goes to
the senders, who must read it, and their caches, which can be read back into it, come to the
receiver.  Both are sealed from the server that carries them (``fedloom.secure.channel``) and travel
in queries of their own; scores and receipts are numbers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from flwr.common import NDArrays
from numpy.typing import NDArray

from fedloom import __version__, border, ciphers
from fedloom.adapters.fuser import CacheFuser
from fedloom.clients.asking import asking, kept, places_of, questions_of
from fedloom.clients.bridge import AdapterClient, client_at, partition_of
from fedloom.clients.eavesdrop import read_back
from fedloom.clients.letters import (
    NONE,
    TEXT,
    UNASKED,
    Tapped,
    answered,
    cache_letter,
    message_of,
    sessions_of,
    why_not,
    words_letter,
)
from fedloom.clients.mutual import hand_over, usable
from fedloom.clients.refine_scores import metrics_of
from fedloom.clients.workbench import device
from fedloom.config import RunConfig
from fedloom.data.prompts import letter_tokens, prompt
from fedloom.data.questions import Question
from fedloom.errors import Refusal
from fedloom.gains import read_gains
from fedloom.holdings import holdings
from fedloom.local import fusers
from fedloom.models.base import Base, load_base
from fedloom.refining import (
    Answer,
    Log,
    Request,
    Sender,
    SourceLost,
    Terms,
    Written,
    decide,
    marked,
    measured,
    refine,
    refine_selected,
)
from fedloom.refining.private import Reword, aligned
from fedloom.refining.rephrasing import rephrase
from fedloom.secure.channel import Channel, session_of
from fedloom.slices.geometry import Geometry
from fedloom.slices.reading import FrameError

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
_STATE = "fedloom-refine"


@dataclass(frozen=True)
class _Peer:
    """Another node, as the server names it."""

    partition: int
    name: str
    geometry: Geometry
    public: bytes


class FedRefineClient(AdapterClient):
    """One owner of questions and of a model; receiver and sender alike."""

    reword: Reword = staticmethod(rephrase)
    """How a question is put in other words, with ``refine.rephrase``."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.config = context, RunConfig.from_flower(context.run_config)
        self.partition_id = partition_of(context)
        told = context.node_config.get("model")
        self.source = str(told or self.config.refine.model_of(self.partition_id))
        self._fusers: dict[int, CacheFuser | None] = {}  # of this one message

    @property
    def base(self) -> Base:
        """Return the model of this node, loaded on first use."""
        torch.set_num_threads(self.config.clients.threads)
        return load_base(self.source, self.config.model.dtype, device(self.config))

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say what this node holds; its model is told when the run asks for it."""
        if self.config.refine.question:  # nobody's rows are asked for
            return {**self._place(), "name": self.source, "test": 0, "data": ""}
        _, partition = holdings(self.config)
        client = client_at(partition, self.partition_id)
        rows = min(len(client.test), self.config.refine.questions)
        told = {"name": client.name, "test": rows, "data": partition.digest()}
        return {**self._place(), **told}

    def _place(self) -> dict[str, Any]:
        return {
            "partition": self.partition_id,
            "train": 0,
            "partition-json": "",
            "version": __version__,
            "recipe": self.config.digest(),
            "device": self.config.model.device,
            "visible-gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "pid": os.getpid(),
        }

    def get_parameters(self, config: dict[str, Any]) -> NDArrays:
        """Return nothing: no array is averaged."""
        self.array_names = []
        return []

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, Any]:
        """Refuse: nothing is trained."""
        raise Refusal("fedrefine trains nothing in a federation: fedloom fuser train makes fusers")

    def refine_hello(
        self, arrays: Arrays, config: Mapping[str, Any]
    ) -> tuple[Arrays, dict[str, Any]]:
        """Say which model this is, and the key that others seal for it."""
        public = ciphers.public_key(self._private())
        told = {"geometry": measured(self.base).to_json(), "public": public.hex()}
        return {}, {**told, "model": self.source, "held": ",".join(fusers.held())}

    def keep_fusers(
        self, arrays: Arrays, config: Mapping[str, Any]
    ) -> tuple[Arrays, dict[str, Any]]:
        """Put fusers on this node's shelf, where later runs find them."""
        for digest, data in arrays.items():
            fusers.keep(digest, data.tobytes())
        return {}, {}

    def ask_caches(
        self, arrays: Arrays, config: Mapping[str, Any]
    ) -> tuple[Arrays, dict[str, Any]]:
        """Seal this node's questions, one letter a sender whose fuser is here and open."""
        exchange, given = str(config["exchange"]), self.config.refine
        if self._state().get(f"nonce-{exchange}"):
            raise Refusal(f"exchange {exchange[:16]} was begun before: each is begun once")
        nonce = os.urandom(32)
        self._store(f"nonce-{exchange}", nonce)
        asked = asking(self.config, self.partition_id, self.base, self.reword)
        if asked.facts is not None:
            self._store(f"rephrased-{exchange}", json.dumps(asked.facts).encode())
        texts, letters, skipped = asked.texts, {}, {}
        peers = [(peer, self._sender(peer, config)) for peer in self._peers(config)]
        choice = self._choose([sender for _, sender in peers], texts, config)
        for peer, sender in peers:
            way = given.dtype if choice is None else choice["chosen"].get(sender.name, NONE)
            why = why_not(sender, way, measured(self.base))
            if asked.facts is not None and (not texts or aligned([sender])):
                why = UNASKED  # nothing to show, or a fuser that needs both to read one text
            if why:
                skipped[peer.partition] = why
                continue
            if choice is not None and way == TEXT:
                body = words_letter(asked.bare, choice["message_tokens"])
            else:
                sessions = sessions_of(nonce, peer.partition, given.mutual or len(texts))
                body = cache_letter(given, texts, sender, way, sessions)
            channel = self._channel(peer.public, exchange, self.partition_id, peer.partition)
            sealed = channel.seal("question", body, 0)
            letters[f"{peer.partition}"] = np.frombuffer(sealed, np.uint8)
        told = {"skipped": json.dumps(skipped)}
        return letters, told if choice is None else told | {"selection": json.dumps(choice)}

    def _choose(
        self, senders: Sequence[Sender], texts: Sequence[str], config: Mapping[str, Any]
    ) -> Log | None:
        """Choose whom to ask, if the run brought gains to go by; keep it for the answer."""
        if not (told := str(config.get("gains", ""))):
            return None
        given, lengths = self.config.refine, [len(self.base.tokenizer.encode(t)) for t in texts]
        choice = decide(
            read_gains(told),
            self.base,
            senders,
            tokens=max(lengths, default=1),
            terms=self._terms(),
            task=given.task,
            privacy=given.privacy_level,
        )
        self._store(f"selection-{config['exchange']}", json.dumps(choice).encode())
        return choice

    def _refined(
        self,
        text: str,
        bare: str,
        senders: Sequence[Sender],
        config: Mapping[str, Any],
        tokens: int = 0,
    ) -> Answer:
        """Answer among senders, or among those of them that were chosen."""
        how: dict[str, Any] = {"terms": self._terms(), "max_new_tokens": tokens}
        if not (kept := self._state().get(f"selection-{config['exchange']}")):
            return refine(self.base, text, senders, **how)
        choice = json.loads(kept)
        return refine_selected(self.base, text, senders, choice, question=bare, **how)

    def export_cache(
        self, arrays: Arrays, config: Mapping[str, Any]
    ) -> tuple[Arrays, dict[str, Any]]:
        """Read another node's questions and seal a slice of the cache of each."""
        if self.config.refine.mutual:
            return hand_over(self, arrays, config), {}
        exchange, asker = str(config["exchange"]), int(config["asker"])
        public = bytes.fromhex(str(config["public"]))
        channel = self._channel(public, exchange, asker, self.partition_id)
        opened = channel.open("question", arrays["letter"].tobytes(), 0)
        given, tapped = self.config.refine, Tapped()
        sealed = answered(opened, self.base, channel, given.max_tokens, tapped)
        return sealed, read_back(self.base, tapped[: given.attack_frames])

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Score this node's questions among all caches that came, among each alone, and alone."""
        started = time.perf_counter()
        came = dict(zip(self.array_names, parameters, strict=True))
        peers, nonce = self._peers(config), self._take_nonce(str(config["exchange"]))
        lost = json.loads(str(config.get("lost", "{}")))
        told: dict[str, list[tuple[Question, Answer]]] = {}
        peers = [p for p in peers if lost.get(str(p.partition)) != UNASKED]
        questions = questions_of(self.config, self.partition_id)
        facts = kept(self._state(), str(config["exchange"]))
        for number, place in enumerate(places_of(facts, len(questions))):
            question = questions[number]
            text = prompt(question, letter_tokens(self.base.tokenizer).cue)
            senders = {}
            if place is not None:
                senders = {p: self._sender(p, config, came, nonce, place) for p in peers}
            groups: dict[str, list[Sender]] = {"": list(senders.values()), "alone": []}
            groups |= {f"pair-{p.partition}": [senders[p]] if senders else [] for p in peers}
            for name, group in groups.items():
                answer = self._refined(text, question.question, group, config)
                if facts is not None and name != "alone":
                    answer = marked(answer, facts[number])
                told.setdefault(name, []).append((question, answer))
        metrics = metrics_of(self.base, told)
        metrics["seconds"] = time.perf_counter() - started
        examples = int(metrics.pop(border.WEIGHT))
        return metrics["gold-ce-sum"] / max(examples, 1), examples, metrics

    def refine_answer(
        self, arrays: Arrays, config: Mapping[str, Any]
    ) -> tuple[Arrays, dict[str, Any]]:
        """Answer the run's one question; the text is sealed for who asked, if they gave a key."""
        given = self.config.refine
        peers, nonce = self._peers(config), self._take_nonce(str(config["exchange"]))
        number, text = max(given.mutual - 1, 0), given.question  # of the last exchange
        senders = [self._sender(peer, config, dict(arrays), nonce, number) for peer in peers]
        answer = self._refined(text, text, senders, config, given.new_tokens)
        alone = refine(self.base, text, [], max_new_tokens=given.new_tokens)
        said = json.dumps({"answer": answer.text, "standalone": alone.text}).encode()
        told = {"receipt": json.dumps(answer.receipt.to_dict()), "public": ""}
        if given.reply_key:
            private = os.urandom(ciphers.KEY_BYTES)
            key = ciphers.agree(private, bytes.fromhex(given.reply_key), b"fedloom refine answer")
            told["public"] = ciphers.public_key(private).hex()
            said = ciphers.seal(key, said, b"answer")
        return {"answer": np.frombuffer(said, np.uint8)}, told

    def _terms(self) -> Terms:
        given = self.config.refine
        return Terms(
            scheme=given.dtype,
            share=given.keep,
            part=given.keep_bytes,
            deadline=given.deadline_seconds,
            max_tokens=given.max_tokens,
            max_norm=given.max_norm,
            max_kl=given.max_kl,
            vote=given.vote,
        )

    def _sender(
        self,
        peer: _Peer,
        config: Mapping[str, Any],
        came: Arrays | None = None,
        nonce: bytes = b"",
        number: int = 0,
    ) -> Sender:
        """Make a source of what a message brought of a peer; without one, of its fuser alone."""
        fuser = self._fuser(peer, config)
        exchange, lost = str(config["exchange"]), json.loads(str(config.get("lost", "{}")))
        channel = self._channel(peer.public, exchange, self.partition_id, peer.partition)

        def brought() -> bytes:
            sealed = (came or {}).get(f"{peer.partition}-{number:04d}")
            if sealed is None:
                cause = str(lost.get(str(peer.partition), "failed"))
                reasons = {"deadline": "no answer in time", "gone": "its node is gone"}
                raise SourceLost(cause, reasons.get(cause, "nothing came of it that counts"))
            try:
                return channel.open("cache", sealed.tobytes(), number)
            except Refusal as error:
                raise FrameError(str(error)) from error

        def ask(request: Request) -> Iterator[bytes]:
            yield brought()

        def tell(text: str, tokens: int, seconds: float) -> Written:
            return message_of(brought(), peer.geometry.model)

        tag = (channel.frame_key, session_of(nonce, peer.partition, number)) if nonce else None
        name = f"{peer.partition} {peer.name}"
        return Sender(peer.geometry, ask, fuser, name, tag, source=peer.name, tell=tell)

    def _fuser(self, peer: _Peer, config: Mapping[str, Any]) -> CacheFuser | None:
        if peer.partition not in self._fusers:
            digests, found = _listed(config, "fusers"), None
            try:
                found = fusers.find(digests, peer.geometry, measured(self.base))
            except Refusal as error:  # a damaged file: this pair has no fuser
                log.warning("%s", error)
            self._fusers[peer.partition] = usable(found, self.config.refine.mutual)
        return self._fusers[peer.partition]

    def _peers(self, config: Mapping[str, Any]) -> list[_Peer]:
        """Read who else is there; one who tells nonsense is left out, and no harm to the others."""
        found = []
        for told in json.loads(str(config["senders"])):
            try:
                geometry = Geometry.from_json(str(told["geometry"]))
                public = bytes.fromhex(str(told["public"]))
                ciphers.agree(self._private(), public, b"fedloom refine, is it a key")
                found.append(_Peer(int(told["partition"]), str(told["name"]), geometry, public))
            except (ValueError, KeyError, TypeError) as error:  # a Refusal is a ValueError
                log.warning("a peer that cannot be asked: %s", error)
        return found

    def _channel(self, public: bytes, exchange: str, asker: int, asked: int) -> Channel:
        return Channel(self._private(), public, exchange, asker, asked)

    def _state(self) -> dict[str, Any]:
        return dict(self.context.state.config_records.get(_STATE, {}))

    def _store(self, name: str, value: bytes) -> None:
        self.context.state[_STATE] = ConfigRecord({**self._state(), name: value})

    def _private(self) -> bytes:
        """Return this node's key of this run, drawn on first use; it is in no message."""
        if (held := self._state().get("private")) is None:
            held = os.urandom(ciphers.KEY_BYTES)
            self._store("private", held)
        return bytes(held)

    def _take_nonce(self, exchange: str) -> bytes:
        """Close an exchange: what comes again of it is refused."""
        nonce = self._state().get(f"nonce-{exchange}")
        if not nonce:
            raise Refusal(
                f"exchange {exchange[:16]} is not open here: it was answered, or this node was"
                " started anew; ask again"
            )
        self._store(f"nonce-{exchange}", b"")
        return bytes(nonce)


def _listed(config: Mapping[str, Any], name: str) -> list[str]:
    return [part for part in str(config.get(name, "")).split(",") if part]

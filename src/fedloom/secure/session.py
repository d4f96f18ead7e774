# SPDX-License-Identifier: Apache-2.0
"""A client's side of one secure summation: four steps, each taken once.

After Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS
2017), figure 4, without the signatures of its active-adversary variant.  A client's numbers leave
under two kinds of masks: one with each other client, which cancel in the sum, and one of its own.
Of both, every other client holds shares: those who finish reveal the own masks of all who sent
numbers, or the key of a client that was lost before it did, and never both of one client.

A session is a value: each step returns the next one, which must be stored before the answer is
sent, so that a step that was answered cannot be asked for again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from fedloom import ciphers
from fedloom.ciphers import KEY_BYTES, Source
from fedloom.errors import Refusal
from fedloom.secure import masks, shamir
from fedloom.secure.keys import Keys, Secrets, Summation, least_threshold
from fedloom.secure.masks import Words
from fedloom.secure.sums import encoded
from fedloom.wire import Arrays

LETTER_BYTES = 2 * shamir.SHARE_BYTES + ciphers.SEAL_BYTES

ADVERTISED, SHARED, MASKED, DONE = "keys", "shares", "masked numbers", "shares to unmask"


@dataclass(frozen=True)
class Session:
    """What a client knows between two steps: secrets, which never enter a message."""

    summation: Summation
    me: int
    stage: str
    """What it gave last."""
    secrets: Secrets = field(repr=False)
    own_seed: bytes = field(default=b"", repr=False)
    """Of the mask that is its own."""
    threshold: int = 0
    peers: dict[int, Keys] = field(default_factory=dict)
    """Public keys of all who take part, itself too."""
    held: dict[int, bytes] = field(default_factory=dict, repr=False)
    """Sender -> its two shares that are for this client: of the mask key, of the own seed."""

    def share(
        self, peers: Mapping[int, Keys], threshold: int, source: Source = ciphers.system
    ) -> tuple[Session, dict[int, bytes], bytes]:
        """Hand out shares of the own secrets.

        Parameters
        ----------
        peers
            The public keys that came, by client.
        threshold
            How many clients must stay to the end; more than half.

        Returns
        -------
        tuple
            The next session, a sealed letter to each other client, and a digest of the own seed by
            which the server will know a false share.
        """
        self._after(ADVERTISED)
        self._check_peers(peers, threshold)
        own = peers[self.me]
        own_seed = source(KEY_BYTES)
        of_key = shamir.split(self.secrets.mask, peers, threshold, source)
        of_seed = shamir.split(own_seed, peers, threshold, source)
        letters = {}
        for peer, keys in peers.items():
            if peer != self.me:
                key = self._seal_key(self.me, peer, own, keys, sends=True)
                about = self.summation.letter(self.me, peer)
                letters[peer] = ciphers.seal(key, of_key[peer] + of_seed[peer], about, source)
        following = replace(
            self,
            stage=SHARED,
            own_seed=own_seed,
            threshold=threshold,
            peers=dict(peers),
            held={self.me: of_key[self.me] + of_seed[self.me]},
        )
        return following, letters, ciphers.digest(own_seed)

    def _check_peers(self, peers: Mapping[int, Keys], threshold: int) -> None:
        if peers.get(self.me) != self.secrets.public():
            raise Refusal(f"client {self.me}: the list of keys does not hold its own as it sent it")
        every = [key for keys in peers.values() for key in keys]
        if len(set(every)) != len(every):
            raise Refusal("one public key came twice: expected two of each client's own")
        if not least_threshold(len(peers)) <= threshold <= len(peers):
            raise Refusal(
                f"a threshold of {threshold} for {len(peers)} clients: expected"
                f" {least_threshold(len(peers))} to {len(peers)}, or a server could unmask one"
                " client with the help of few"
            )

    def mask(
        self, letters: Mapping[int, bytes], arrays: Arrays, bits: int
    ) -> tuple[Session, Words]:
        """Open the letters that came and mask this client's numbers.

        Parameters
        ----------
        letters
            By sender, without the own one: exactly those whose masks are taken in.
        arrays
            What is to be summed.
        bits
            After the point, in fixed point.

        Raises
        ------
        Refusal
            If a letter was tampered with, too few came, or a number is too large for the sum.
        """
        self._after(SHARED)
        senders = {*letters, self.me}
        if strange := sorted(letters.keys() - self.peers.keys() | letters.keys() & {self.me}):
            raise Refusal(f"a letter from client {strange[0]}, who gave no key in this round")
        self._enough(len(senders), "handed out shares")
        held = {**self.held, **{sender: self._open(sender, letters[sender]) for sender in letters}}
        words = encoded(arrays, bits, len(senders))
        masks.add(words, self.own_seed)
        for peer in sorted(letters):
            keys, own = self.peers[peer], self.peers[self.me]
            seed = self.summation.mask_seed(self.secrets.mask, self.me, peer, own, keys)
            (masks.add if self.me < peer else masks.subtract)(words, seed)
        return replace(self, stage=MASKED, held=held), words

    def _open(self, sender: int, letter: bytes) -> bytes:
        own, other = self.peers[self.me], self.peers[sender]
        key = self._seal_key(sender, self.me, own, other, sends=False)
        try:
            text = ciphers.unseal(key, letter, self.summation.letter(sender, self.me))
        except Refusal as error:
            raise Refusal(f"client {self.me}, from client {sender}: {error}") from error
        if len(text) != 2 * shamir.SHARE_BYTES:
            raise Refusal(f"client {sender} sealed {len(text)} bytes, which are not two shares")
        return text

    def unmask(self, survivors: Collection[int]) -> tuple[Session, dict[int, bytes]]:
        """Reveal one share of each client: of its own seed if it survived, else of its mask key.

        The session that is left knows no secret: a second list of survivors gets no answer.
        """
        self._after(MASKED)
        alive = set(survivors)
        if len(alive) != len(survivors) or self.me not in alive or alive - self.held.keys():
            raise Refusal(
                f"survivors {sorted(survivors)[:8]}: expected different clients of the"
                f" {len(self.held)} who handed out shares, client {self.me} among them"
            )
        self._enough(len(alive), "sent numbers")
        half = shamir.SHARE_BYTES
        shares = {
            peer: pair[half:] if peer in alive else pair[:half] for peer, pair in self.held.items()
        }
        return Session(self.summation, self.me, DONE, Secrets(b"", b"")), shares

    def _seal_key(
        self, sender: int, receiver: int, own: Keys, other: Keys, *, sends: bool
    ) -> bytes:
        return self.summation.seal_key(self.secrets.seal, sender, receiver, own, other, sends=sends)

    def _after(self, stage: str) -> None:
        if self.stage != stage:
            raise Refusal(
                f"client {self.me} gave its {self.stage} last in summation {self.summation.round}:"
                f" expected its {stage}; each step is taken once, start a new summation"
            )

    def _enough(self, count: int, what: str) -> None:
        if count < self.threshold:
            raise Refusal(f"{count} clients {what}, {self.threshold} are needed: nothing is told")

    def check(self, summation: Summation) -> None:
        """Refuse a message of another run or round."""
        if summation != self.summation:
            raise Refusal(
                f"a message of summation {summation.round} of run {summation.run[:16]}: client"
                f" {self.me} is in {self.summation.round} of {self.summation.run[:16]}"
            )

    def to_bytes(self) -> bytes:
        """Write the session, secrets and all, for a place that nobody else reads."""
        tree = asdict(self) | {"summation": [self.summation.run, self.summation.round]}
        return json.dumps(tree, default=bytes.hex).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Session:
        """Read what ``to_bytes`` wrote."""
        tree = json.loads(data)
        return cls(
            Summation(*tree["summation"]),
            tree["me"],
            tree["stage"],
            Secrets(*map(bytes.fromhex, tree["secrets"])),
            bytes.fromhex(tree["own_seed"]),
            tree["threshold"],
            {int(p): Keys(*map(bytes.fromhex, keys)) for p, keys in tree["peers"].items()},
            {int(p): bytes.fromhex(pair) for p, pair in tree["held"].items()},
        )


def advertise(
    summation: Summation,
    me: int,
    before: Session | None = None,
    source: Source = ciphers.system,
) -> tuple[Session, Keys]:
    """Begin a summation: draw this client's keys.

    Parameters
    ----------
    before
        The session that this client was in; its secrets are forgotten.

    Raises
    ------
    Refusal
        If that was this summation or a later one of the same run: sums over other survivors of
        the same numbers would tell them apart.
    """
    last = before.summation if before else None
    if last and last.run == summation.run and last.round >= summation.round:
        raise Refusal(
            f"client {me} began summation {last.round} of this run already, {summation.round} came:"
            " number each new one higher"
        )
    secrets = Secrets.draw(source)
    return Session(summation, me, ADVERTISED, secrets), secrets.public()


def pack(parts: Mapping[int, bytes]) -> tuple[list[int], bytes]:
    """Put equally long bytes by client into a list of clients and one string."""
    ids = sorted(parts)
    return ids, b"".join(parts[i] for i in ids)


def unpack(ids: Iterable[int], data: bytes, size: int) -> dict[int, bytes]:
    """Read what ``pack`` made.

    Raises
    ------
    Refusal
        If a client is listed twice, or the bytes do not divide among them.
    """
    listed = list(ids)
    if len(set(listed)) != len(listed) or min(listed, default=0) < 0:
        raise Refusal(f"clients {sorted(listed)[:8]}: expected different numbers from zero")
    if len(data) != size * len(listed):
        raise Refusal(f"{len(data)} bytes for {len(listed)} clients: expected {size} for each")
    return {client: data[i * size : (i + 1) * size] for i, client in enumerate(listed)}

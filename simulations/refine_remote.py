# SPDX-License-Identifier: Apache-2.0
"""One question to a running federation: a run whose ServerApp makes one exchange.

The answer comes back through the run's log, sealed for this process alone; the receipt beside it is
no secret.  The question is not sealed: it is in the run's config, which the SuperLink keeps and
every node of the run can read.  Where that is too much, ask from the receiver's own machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom import ciphers
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.secure.channel import MARK
from fedloom.simulations.superlink import SuperLinkError, environment, tool, write_app

_PATIENCE = 900.0
"""Seconds beyond the deadline for senders that a run may take to start, meet and answer."""
_KEYS = {
    "scheme": "dtype",
    "share": "keep",
    "part": "keep-bytes",
    "deadline": "deadline-seconds",
    "max_kl": "max-kl",
    "max_norm": "max-norm",
    "vote": "vote",
    "select": "select",
    "task": "task",
    "privacy": "privacy-level",
    "mutual": "mutual",
}


def ask_federation(
    on: str,
    question: str,
    receiver: str,
    terms: Mapping[str, Any],
    max_new_tokens: int,
    root_certificates: Path | None,
    settings: Sequence[str],
) -> dict[str, Any]:
    """Submit the run, wait for it, and return ``answer``, ``standalone`` and ``receipt``.

    With ``mutual`` in the terms it is the same of each node, as a list under ``answers``.

    Parameters
    ----------
    on
        A connection of Flower's own configuration, or ``HOST:PORT``.
    receiver
        The partition that answers.
    settings
        Keys of the recipe, such as ``clients.count=2`` and ``refine.fusers=DIR``.

    Raises
    ------
    Refusal
        If the input cannot be used or the federation gave no answer.
    """
    if not receiver.isdigit():
        raise Refusal(f'--receiver "{receiver}" with --on: expected the partition that answers')
    private = os.urandom(ciphers.KEY_BYTES)
    told: dict[str, Any] = {f"refine.{_KEYS[name]}": x for name, x in terms.items()}
    told |= {
        "refine.question": question,
        "refine.receiver": int(receiver),
        "refine.new-tokens": max_new_tokens,
        "refine.reply-key": ciphers.public_key(private).hex(),
    }
    config = _recipe(settings, told)
    try:
        with _connection(on, root_certificates) as link:
            lines = link.answers(config)
    except SuperLinkError as error:
        raise Refusal(f"--on {on}: {error}") from error
    kept = ("partition", "model", "receipt")
    told_back = [{**opened(x, private), **{key: x[key] for key in kept}} for x in lines]
    if config.refine.mutual:
        return {"answers": sorted(told_back, key=lambda each: int(each["partition"]))}
    return {key: told_back[0][key] for key in ("answer", "standalone", "receipt")}


def _recipe(settings: Sequence[str], told: Mapping[str, Any]) -> RunConfig:
    from fedloom.simulations.cli import read_recipe

    return read_recipe("fedrefine", settings, dict(told))


def opened(line: Mapping[str, Any], private: bytes) -> dict[str, Any]:
    """Open what the receiver sealed for the key whose secret half this is."""
    key = ciphers.agree(private, bytes.fromhex(line["public"]), b"fedloom refine answer")
    found: dict[str, Any] = json.loads(
        ciphers.unseal(key, bytes.fromhex(line["sealed"]), b"answer")
    )
    return found


@dataclass(frozen=True)
class _Link:
    """Flower's command line, pointed at one SuperLink."""

    name: str
    folder: Path
    environment: Mapping[str, str]

    def answers(self, config: RunConfig) -> list[dict[str, Any]]:
        """Run a recipe of one question and find its answers in the log: one, or each node's."""
        app = write_app(self.folder / "app", config)
        run = str(self._json("run", str(app), self.name)["run-id"])
        last, lines = "", list[dict[str, Any]]()
        waits = max(config.refine.mutual, 1)  # one a turn
        for line in self._log(run, waits * config.refine.deadline_seconds + _PATIENCE):
            if (at := line.find(MARK)) >= 0:
                lines.append(json.loads(line[at + len(MARK) :]))
                if len(lines) == lines[0]["answers"]:
                    return lines
            last = line.strip() or last
        row = self._json("ls", self.name, "--run-id", run)["runs"][0]
        raise SuperLinkError(
            f"run {run} is {row['status']} without an answer ({row['status-details']}); the last"
            f" line of its log: {last[-300:]}"
        )

    def _log(self, run: str, seconds: float) -> Iterator[str]:
        """Yield the run's log as it grows: one process, where asking for the status is one each."""
        process = subprocess.Popen(
            [tool("flwr"), "log", run, self.name],
            env={**self.environment, "PYTHONUNBUFFERED": "1"},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield re.sub(r"\x1b\[[0-9;]*m", "", line.decode("utf-8", "replace"))
        finally:
            timer.cancel()
            process.kill()
            process.communicate()

    def _json(self, *arguments: str) -> dict[str, Any]:
        said = self._flwr(*arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(said)
        except json.JSONDecodeError as error:
            raise SuperLinkError(f"flwr {arguments[0]} failed: {said.strip()[-300:]}") from error
        if not answer.get("success"):
            raise SuperLinkError(f"flwr {arguments[0]}: {answer.get('error-message', answer)}")
        return answer

    def _flwr(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [tool("flwr"), *arguments],
                env=dict(self.environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=180,
            )
        except subprocess.TimeoutExpired as error:
            raise SuperLinkError(f"flwr {arguments[0]} gave no answer in 180 s") from error
        return (done.stdout or done.stderr).decode("utf-8", "replace")


@contextlib.contextmanager
def _connection(on: str, root_certificates: Path | None) -> Iterator[_Link]:
    """Take Flower's own connection of that name, or write one for an address in a home of ours."""
    with tempfile.TemporaryDirectory(prefix="fedloom-") as made:
        folder = Path(made)
        kept = environment(folder)
        if ":" not in on:  # a name: the user's own home knows it
            home = os.environ.get("FLWR_HOME", str(Path.home() / ".flwr"))
            yield _Link(on, folder, {**kept, "FLWR_HOME": home})
            return
        secure = "insecure = true"
        if root_certificates is not None:
            if not root_certificates.is_file():
                raise Refusal(f"--root-certificates {root_certificates}: expected a PEM file")
            secure = f"root-certificates = {json.dumps(str(root_certificates.resolve()))}"
        home_folder = folder / "home"
        home_folder.mkdir()
        (home_folder / "config.toml").write_text(
            f'[superlink]\ndefault = "asked"\n\n[superlink.asked]\naddress = {json.dumps(on)}\n'
            f"{secure}\n",
            encoding="utf-8",
        )
        yield _Link("asked", folder, kept)

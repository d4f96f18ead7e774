# SPDX-License-Identifier: Apache-2.0
"""Pairs of real models on real questions: what a sender's cache adds, and what of it is the sender.

``run`` teaches and scores one condition after another for each pair and seed, and keeps every
held-out row's outcome in a file; what is there already is not run again, so the study may be
stopped at any time.  ``table`` compares them on the same rows: accuracy by the likelihood of the
options, McNemar's test and a paired bootstrap interval, bytes, seconds.

Conditions, all on the same training rows and steps:

- ``refined``: the small fuser, with its controls (``shuffled``: another question's cache,
  ``zeroed``: an empty one) and, for the first seed, what 8 bits, 4 bits and under half of the
  tokens leave of it;
- ``identical``: the sender is the receiver's own model, so that only the fuser's parameters and
  the second reading are new; the margin over it is the other model's;
- ``random``: the sender has random weights;
- ``tuned``: no sender, the receiver itself is tuned (LoRA on its last layers) with as many
  parameters as the fuser has;
- ``closed``: the fuser solved without a gradient, from sums; ``polished``: taught from there;
- ``context``: the receiver sees the options alone, the sender the whole question;
- ``c2c``: Cache-to-Cache's size of fuser, some forty times as large (not run by default).

The receiver reads all but its last token alone (``tail`` 1, FedRefine's equation as written), so
frozen caches are computed once, kept in the folder, and a step costs the fuser and one token.
Nothing is selected on held-out rows.  Run as ``python benchmarks/fedrefine/pairs.py run|table
--help``; the last line of ``table`` is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from pairs_table import told
from question_sets import SETS, question_set
from transformers import AutoModelForCausalLM

from fedloom import seeds
from fedloom.adapters.attach import Adapter
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.adapters.fuser_files import card_of, save_fuser
from fedloom.config import RunConfig
from fedloom.models.answers import Prompts, answer_logits, answer_loss
from fedloom.models.base import Base, load_base
from fedloom.models.trunk import Trunk
from fedloom.refining.classroom import Classroom
from fedloom.refining.hearing import Party, Shelf
from fedloom.refining.lessons import Encoded, question_lesson
from fedloom.refining.scoring import (
    Outcome,
    as_sent,
    gate_report,
    score,
    shuffled,
    zeroed,
)
from fedloom.refining.teaching import TeachConfig, calibrate, handed, teach
from fedloom.slices.frames import encode
from fedloom.slices.slice import CacheSlice
from fedloom.training import train_locally

SHORT = {
    "smol": "embedded:smollm2-135m",
    "gemma": "embedded:gemma3-270m",
    "qwen": "embedded:qwen2.5-coder-0.5b",
}
PAIRS = ("qwen-smol", "gemma-smol", "smol-qwen")
CONDITIONS = ("refined", "identical", "random", "tuned", "closed", "polished", "context")
MORE = ("c2c",)
SEEDLESS = ("closed",)
LAST_LAYERS = 8
"""That ``tuned`` adapts: the frozen ones below are walked once a row."""


@dataclass
class Study:
    """One pair with everything that its conditions share."""

    given: argparse.Namespace
    pair: str

    def __post_init__(self) -> None:
        sender, receiver = (SHORT.get(x, x) for x in self.pair.split("-", 1))
        rows = question_set(self.given.set, self.given.folder)
        count = self.given.train + self.given.test
        if len(rows) < count:
            raise SystemExit(f"{self.given.set} has {len(rows)} rows, {count} are wanted")
        order = seeds.generator(0, "pairs", self.given.set).permutation(len(rows))[:count]
        self.questions = [rows[i] for i in order]
        self.receiver = self.shelf(load_base(receiver))
        self.sender = self.shelf(load_base(sender))

    def shelf(self, base: Base) -> Shelf:
        """Keep a model's slices in the study's folder."""
        return Shelf(Party.of(base), budget=self.given.memory << 20, folder=self.given.slices)

    def room(self, sender: Shelf, setting: str = "same") -> Classroom:
        """Part the questions: the same rows are held out in every condition and from every seed."""
        lessons = [question_lesson(q, setting) for q in self.questions]
        cut = self.given.train
        parts = lessons[:cut], lessons[cut:]
        return Classroom.of(sender, self.receiver, *parts, longest=self.given.longest)

    def config(self, **told: Any) -> FuserConfig:
        """Read all but the last token alone, unless the receiver slides windows."""
        slides = len(self.receiver.party.geometry.full) < self.receiver.party.geometry.layers
        if slides:
            return FuserConfig(**told)
        return FuserConfig(tail=1, sink="receiver", **told)

    def how(self, **told: Any) -> TeachConfig:
        """Teach every condition alike."""
        return TeachConfig(
            **{
                "steps": self.given.steps,
                "batch": self.given.batch,
                "learning_rate": self.given.lr,
                **told,
            }
        )


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(o) for o in outcomes]


def taught(
    study: Study,
    room: Classroom,
    seed: int,
    place: Path,
    fuser: CacheFuser | None = None,
    size: str = "small",
    **changes: Any,
) -> tuple[CacheFuser, dict[str, Any]]:
    """Teach a fuser, from a checkpoint if one is there."""
    if fuser is None:
        fuser = room.fresh(study.config(size=size), seed=seed)
        calibrate(fuser, room.sender, room.receiver, room.learnt, seed=seed)
    how = study.how(**changes)
    began = time.process_time()

    def progress(step: int, loss: float) -> None:
        if step % 25 == 0 or step == how.steps:
            print(f"  {step} of {how.steps}: {loss:.3f}", flush=True)

    report = teach(
        fuser,
        room.sender,
        room.receiver,
        room.learnt,
        how,
        seed=seed,
        folder=place,
        progress=progress,
    )
    facts = {"loss_first": report.loss_first, "loss_last": report.loss_last}
    facts |= {"train_cpu_seconds": time.process_time() - began, "resumed": report.resumed}
    return fuser, facts


def halved(shelf: Shelf, lesson: Encoded) -> CacheSlice:
    """Keep 44 % of the tokens: with scales and frames, 8 bits are then a quarter of the bytes."""
    return handed(shelf, lesson, max(int(0.44 * len(lesson.shown_ids)), 2))


def bytes_of(pieces: Sequence[CacheSlice], scheme: str) -> float:
    """Return the mean bytes of a slice in frames, layers that the fuser looks at or not."""
    key, session = secrets.token_bytes(32), secrets.token_bytes(16)
    return mean(sum(len(f) for f in encode(p, scheme, key, session)) for p in pieces[:20])


def examined(
    room: Classroom, fuser: CacheFuser, seed: int, *, curve: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score a fuser on held-out rows beside its controls."""
    held = room.held
    whole = [handed(room.sender, lesson) for lesson in held]
    given: dict[str, list[CacheSlice]] = {"refined": whole}
    given["shuffled"] = shuffled(whole, seed=seed)
    given["zeroed"] = [zeroed(piece) for piece in whole]
    facts: dict[str, Any] = {"bytes": {"bf16": bytes_of(whole, "bf16")}}
    if curve:
        half = [halved(room.sender, lesson) for lesson in held]
        for name, pieces in (("", whole), ("-half", half)):
            for scheme in ("bf16", "int8", "int4"):
                given[scheme + name] = [as_sent(piece, scheme) for piece in pieces]
                facts["bytes"][scheme + name] = bytes_of(pieces, scheme)
    found = {name: score(room.receiver, held, fuser, pieces) for name, pieces in given.items()}
    facts |= gate_report(room.receiver, held, fuser, whole, found["refined"], seed=seed)
    facts |= {"parameter_share": fuser.parameter_share}
    return {name: rows_of(outcomes) for name, outcomes in found.items()}, facts


def by_fuser(study: Study, seed: int, place: Path, condition: str) -> dict[str, Any]:
    """Teach and test one of the conditions that have a fuser."""
    sender, setting = study.sender, "context" if condition == "context" else "same"
    if condition == "identical":
        sender = study.receiver
    elif condition == "random":
        sender = study.shelf(scrambled(study.sender.party.base, seed))
    room = study.room(sender, setting)
    began, start, about = time.process_time(), None, {}
    if condition in ("closed", "polished"):
        start, about = room.solved(study.config(), ridge=1e-2, weighted=True)
        about["solve_cpu_seconds"] = time.process_time() - began
    if condition == "closed":
        assert start is not None
        fuser, facts = start, {}
    else:
        size = "c2c" if condition == "c2c" else "small"
        fuser, facts = taught(study, room, seed, place, start, size)
    curve = condition == "refined" and seed == study.given.seeds[0]
    outcomes, more = examined(room, fuser, seed, curve=curve)
    alone = score(room.receiver, room.held, None, config=fuser.config)
    outcomes["standalone"] = rows_of(alone)
    if condition == "refined":
        outcomes["sender"] = rows_of(by_itself(study, room))
        names = (study.sender.party.base.source, study.receiver.party.base.source)
        card = card_of(fuser, *map(str, names), steps=study.given.steps, seed=seed)
        save_fuser(place / "fuser.safetensors", fuser, card)
    return {"outcomes": outcomes, **facts, **about, **more}


def by_itself(study: Study, room: Classroom) -> list[Outcome]:
    """Score the sender on the same rows, in its own tokens, without anybody's help."""
    seen = Classroom.of(
        study.sender,
        study.sender,
        *([question_lesson(q) for q in part] for part in parts(study)),
        longest=study.given.longest,
    )
    kept = {lesson.row for lesson in room.held}
    held = [lesson for lesson in seen.held if lesson.row in kept]
    sliding = len(study.sender.party.geometry.full) < study.sender.party.geometry.layers
    config = FuserConfig() if sliding else FuserConfig(tail=1, sink="receiver")
    return score(study.sender, held, None, config=config)


def parts(study: Study) -> tuple[list[Any], list[Any]]:
    return study.questions[: study.given.train], study.questions[study.given.train :]


def scrambled(base: Base, seed: int) -> Base:
    """Return a model of the same architecture that has learnt nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.split(seed, "random-sender"))
        made = AutoModelForCausalLM.from_config(base.model.config, attn_implementation="sdpa")
    name = hashlib.sha256(f"{base.base_hash}|random|{seed}".encode()).hexdigest()
    return replace(base, model=made.requires_grad_(False).eval(), base_hash=name)


def tuned(study: Study, seed: int) -> dict[str, Any]:
    """Tune the receiver itself with as many parameters as its fuser has, for as many steps."""
    room, base = study.room(study.sender), study.receiver.party.base
    with torch.device("meta"):
        pair = study.sender.party.geometry, study.receiver.party.geometry
        wanted = sum(p.numel() for p in CacheFuser(*pair, study.config()).parameters())
    last = min(LAST_LAYERS, study.receiver.party.geometry.layers)
    common = {"memory__enabled": False, "last_layers": last, "lora__targets": "all-linear"}
    one = Adapter(base.model, RunConfig().replaced(lora__rank=1, lora__alpha=1.0, **common), seed)
    rank = max(round(wanted / sum(p.numel() for p in one.parameters().values())), 1)
    one.detach()
    config = RunConfig().replaced(
        lora__rank=rank,
        lora__alpha=float(rank),
        train__max_steps=study.given.steps,
        train__batch_size=study.given.batch,
        train__learning_rate=study.given.tuned_lr,
        **common,
    )
    adapter = Adapter(base.model, config, seed)
    trunk = Trunk(base.model, study.receiver.party.geometry.layers - last, 4 << 30)
    began = time.process_time()

    def loss(batch: list[Encoded]) -> tuple[torch.Tensor, int]:
        prompts = Prompts.of([lesson.prompt_ids for lesson in batch], base.model.device)
        answers = torch.tensor([lesson.answer_ids[0] for lesson in batch])
        return answer_loss(base.model, prompts, answers, trunk), prompts.tokens

    report = train_locally(
        adapter, room.learnt, loss, lambda x: len(x.prompt_ids), config.train, seed=seed
    )
    seconds = time.process_time() - began
    found = []
    with torch.no_grad():
        for lesson in room.held:
            prompts = Prompts.of([lesson.prompt_ids], base.model.device)
            logp = answer_logits(base.model, prompts, trunk)[0].log_softmax(-1)
            options = tuple(float(logp[ids[0]]) for ids in lesson.option_ids)
            best = max(range(len(options)), key=options.__getitem__)
            found.append(Outcome(lesson.row, best == lesson.gold, -options[lesson.gold], options))
    count = sum(p.numel() for p in adapter.parameters().values())
    adapter.detach()
    return {
        "outcomes": {"refined": rows_of(found)},
        "loss_first": report.loss_first,
        "loss_last": report.loss_last,
        "train_cpu_seconds": seconds,
        "parameter_share": count / study.receiver.party.geometry.parameters,
    }


def run(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    given.slices = given.folder / "slices"
    for pair in given.pairs:
        study: Study | None = None
        for condition in given.conditions:
            for seed in given.seeds[:1] if condition in SEEDLESS else given.seeds:
                out = given.folder / "scores" / f"{pair}-{condition}-{seed}.json"
                if out.exists() or (seed != given.seeds[0] and condition not in given.repeated):
                    continue
                study = study or Study(given, pair)
                began, busy = time.perf_counter(), time.process_time()
                place = given.folder / "fusers" / f"{pair}-{condition}-{seed}"
                if condition == "tuned":
                    made = tuned(study, seed)
                else:
                    made = by_fuser(study, seed, place, condition)
                made |= {"seconds": time.perf_counter() - began}
                made |= {"cpu_seconds": time.process_time() - busy, "set": given.set}
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(made))
                print(f"{pair} {condition} {seed}: {made['cpu_seconds']:.0f} CPU s", flush=True)


def table(given: argparse.Namespace) -> None:
    print(json.dumps(told(given.folder, given.pairs, given.seeds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, work in (("run", run), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        command.add_argument("--folder", type=Path, default=Path("runs/pairs"))
        command.add_argument("--pairs", nargs="+", default=["qwen-smol"], help=str(PAIRS))
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        if name == "run":
            everything = (*CONDITIONS, *MORE)
            command.add_argument("--conditions", nargs="+", choices=everything, default=CONDITIONS)
            command.add_argument("--repeated", nargs="+", default=["refined"])
            command.add_argument("--set", choices=tuple(SETS), default="hotels-fr")
            command.add_argument("--train", type=int, default=400)
            command.add_argument("--test", type=int, default=200)
            command.add_argument("--steps", type=int, default=120)
            command.add_argument("--batch", type=int, default=8)
            command.add_argument("--lr", type=float, default=5e-4)
            command.add_argument("--tuned-lr", type=float, default=5e-4)
            command.add_argument("--longest", type=int, default=110, help="tokens of a text")
            command.add_argument("--memory", type=int, default=512, help="MB of slices a model")
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()

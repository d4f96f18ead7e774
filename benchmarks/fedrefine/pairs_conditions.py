# SPDX-License-Identifier: Apache-2.0
"""The conditions of ``pairs.py``: each is taught and scored on the same held-out rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pairs_letters import prior_of
from pairs_study import (
    HALF,
    Study,
    bytes_of,
    curve_of,
    generated,
    rows_of,
    scrambled,
    sides,
    slides,
    taught,
)

from fedloom.adapters.attach import Adapter
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.adapters.fuser_files import card_of, load_fuser, save_fuser
from fedloom.config import RunConfig
from fedloom.data.questions import LETTERS
from fedloom.errors import Refusal
from fedloom.models.answers import Prompts, answer_logits, answer_loss
from fedloom.models.base import load_base
from fedloom.models.trunk import Trunk
from fedloom.refining import Sender, refine
from fedloom.refining.classroom import Classroom
from fedloom.refining.hearing import Shelf
from fedloom.refining.lessons import Encoded, question_lesson
from fedloom.refining.scoring import Outcome, gate_report, score, shuffled, zeroed
from fedloom.refining.teaching import handed
from fedloom.slices.slice import CacheSlice
from fedloom.training import train_locally

LAST_LAYERS = 8
"""That ``tuned`` adapts: the frozen ones below are walked once a row."""


def examined(
    room: Classroom, fuser: CacheFuser, seed: int, *, curve: bool = False, keep: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score a fuser on held-out rows beside its controls."""
    held = room.held
    whole = [handed(room.sender, lesson, keep) for lesson in held]
    given: dict[str, list[CacheSlice]] = {"refined": whole}
    given["shuffled"] = shuffled(whole, seed=seed)
    given["zeroed"] = [zeroed(piece) for piece in whole]
    facts: dict[str, Any] = {"bytes": {"kept" if keep else "bf16": bytes_of(whole, "bf16")}}
    if curve:
        made = curve_of(room.sender, held)
        given |= made
        facts["bytes"] |= {
            name: bytes_of(pieces, name.split("-", 1)[0]) for name, pieces in made.items()
        }
    found = {name: score(room.receiver, held, fuser, pieces) for name, pieces in given.items()}
    facts |= gate_report(room.receiver, held, fuser, whole, found["refined"], seed=seed)
    facts |= {"parameter_share": fuser.parameter_share}
    return {name: rows_of(outcomes, held) for name, outcomes in found.items()}, facts


def by_fuser(study: Study, seed: int, place: Path, condition: str) -> dict[str, Any]:
    """Teach and test one of the conditions that have a fuser."""
    sender, setting = study.sender, "context" if condition == "context" else "same"
    if condition == "identical":
        sender = study.receiver
    elif condition == "random":
        sender = study.shelf(scrambled(study.sender.party.base, seed))
    room = study.room(sender, setting)
    began, start, about = time.process_time(), None, dict[str, Any]()
    if condition in ("closed", "polished"):
        start, about = room.solved(study.config(), ridge=1e-2, weighted=True)
        about["solve_cpu_seconds"] = time.process_time() - began
    keep = 0
    if condition == "kept":
        keep = max(int(HALF * median(len(lesson.shown_ids) for lesson in room.learnt)), 2)
        about["kept_tokens"] = keep
    if condition == "closed":
        assert start is not None
        fuser, facts = start, dict[str, Any]()
    else:
        size = "c2c" if condition == "c2c" else "small"
        fuser, facts = taught(study, room, seed, place, start, size, keep=keep)
    curve = condition == "refined" and seed == study.given.seeds[0]
    outcomes, more = examined(room, fuser, seed, curve=curve, keep=keep)
    alone = score(room.receiver, room.held, None, config=fuser.config)
    outcomes["standalone"] = rows_of(alone, room.held)
    if condition == "refined":
        outcomes["sender"] = rows_of(by_itself(study, room), room.held)
        outcomes |= as_written(room, fuser)
        more["priors"] = priors(room, fuser, study.given.priors)
        names = (study.sender.party.base.source, study.receiver.party.base.source)
        card = card_of(fuser, *map(str, names), steps=study.given.steps, seed=seed)
        save_fuser(study.fuser_file(study.pair, seed), fuser, card)
    return {"outcomes": outcomes, **facts, **about, **more}


def as_written(room: Classroom, fuser: CacheFuser) -> dict[str, list[dict[str, Any]]]:
    """Score by what is written rather than by likelihood: with the fuser, and alone."""
    given = [handed(room.sender, lesson) for lesson in room.held]
    gold = [LETTERS[lesson.gold] for lesson in room.held]
    how = fuser.config
    return {
        "refined-written": generated(room.receiver, room.held, gold, fuser, given, config=how),
        "standalone-written": generated(room.receiver, room.held, gold, None, config=how),
    }


def priors(room: Classroom, fuser: CacheFuser, most: int) -> dict[str, Any]:
    """Return every letter's mean log-probability over training rows, whose labels are not used."""
    rows = room.learnt[: most or None]
    given = [handed(room.sender, lesson) for lesson in rows]
    alone = score(room.receiver, rows, None, config=fuser.config)
    helped = score(room.receiver, rows, fuser, given)
    told = {"standalone": alone, "refined": helped}
    return {"rows": len(rows)} | {name: prior_of(rows_of(x, rows)) for name, x in told.items()}


def several(study: Study, seed: int) -> dict[str, Any]:
    """Fuse the caches of one, two, ... senders by ``refine``; their fusers were taught by pair.

    Raises
    ------
    Refusal
        If no other pair is named, one has another receiver, or its fuser is not there yet.
    """
    pairs = [study.pair, *(p for p in study.given.together if p != study.pair)]
    files = [study.fuser_file(pair, seed) for pair in pairs]
    odd = [p for p in pairs if sides(p)[1] != sides(study.pair)[1]]
    missing = [pair for pair, file in zip(pairs, files, strict=True) if not file.exists()]
    if len(pairs) < 2 or odd or missing:
        raise Refusal(
            f"several senders of {' '.join(pairs)}: --together names other pairs of this receiver"
            f" whose fusers are there; of another receiver: {odd}, not there: {missing}"
        )
    receiver, held = study.receiver, study.room(study.sender).held
    texts = {x.row(): x.prompt for x in map(question_lesson, study.parts()[1])}
    shelves = [study.shelf(load_base(sides(pair)[0])) for pair in pairs]
    loaded = [
        load_fuser(file, shelf.party.geometry, receiver.party.geometry)[0]
        for file, shelf in zip(files, shelves, strict=True)
    ]
    senders = [_sender(*each) for each in zip(shelves, loaded, pairs, strict=True)]
    outcomes = {}
    for count in range(len(senders) + 1):
        found = [_among(receiver, senders[:count], texts[x.row], x) for x in held]
        outcomes[f"senders-{count}"] = rows_of(found, held)
    return {"outcomes": outcomes, "senders": pairs}


def _among(receiver: Shelf, senders: Sequence[Sender], text: str, lesson: Encoded) -> Outcome:
    """Answer as ``refine`` does; what all options begin with is read, their last token compared."""
    base, head = receiver.party.base, lesson.option_ids[0][:-1]
    if any(ids[:-1] != head for ids in lesson.option_ids):
        raise Refusal("options that differ in more than their last token: give lettered ones")
    answer = refine(base, text + base.tokenizer.decode(list(head)), senders, max_new_tokens=0)
    if (used := answer.receipt.count("used")) != len(senders):
        raise Refusal(f"{used} of {len(senders)} senders were heard: {answer.receipt.sources}")
    logp = answer.logits.log_softmax(-1)
    options = tuple(float(logp[ids[-1]]) for ids in lesson.option_ids)
    best = max(range(len(options)), key=options.__getitem__)
    return Outcome(lesson.row, best == lesson.gold, -options[lesson.gold], options)


def _sender(shelf: Shelf, fuser: CacheFuser, name: str) -> Sender:
    """Hand out what lies on the shelf, as ``refining.local`` would hand out what it reads."""
    tokenizer = shelf.party.base.tokenizer

    def ask(request: Any) -> CacheSlice:
        return shelf.slice(tokenizer.encode(request.text))

    return Sender(shelf.party.geometry, ask, fuser, name)


def by_itself(study: Study, room: Classroom) -> list[Outcome]:
    """Score the sender on the same rows, in its own tokens, without anybody's help."""
    seen = Classroom.of(
        study.sender,
        study.sender,
        *([question_lesson(q) for q in part] for part in study.parts()),
        longest=study.given.longest,
    )
    kept = {lesson.row for lesson in room.held}
    held = [lesson for lesson in seen.held if lesson.row in kept]
    config = FuserConfig() if slides(study.sender) else FuserConfig(tail=1, sink="receiver")
    return score(study.sender, held, None, config=config)


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
        "outcomes": {"refined": rows_of(found, room.held)},
        "loss_first": report.loss_first,
        "loss_last": report.loss_last,
        "train_cpu_seconds": seconds,
        "parameter_share": count / study.receiver.party.geometry.parameters,
    }


def work_of(condition: str) -> Callable[[Study, int, Path], dict[str, Any]]:
    """Return what runs a condition."""
    if condition == "tuned":
        return lambda study, seed, place: tuned(study, seed)
    if condition == "several":
        return lambda study, seed, place: several(study, seed)
    return lambda study, seed, place: by_fuser(study, seed, place, condition)

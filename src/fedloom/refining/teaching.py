# SPDX-License-Identifier: Apache-2.0
"""The fuser's training: frozen models on both sides, cross-entropy of the receiver's answer alone.

Cache-to-Cache's recipe (arXiv 2510.03215): AdamW, warm-up, decay, clipping, and gates that cool
down over the steps that are really taken.  It is not ``fedloom.training``, whose optimiser lives
for one round of a client: a fuser is taught once, for long, so its learning rate moves, its gates
cool, and a run that was stopped goes on to the same bits.  What a step draws depends on the seed
and its own number, so no state of a generator has to be kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedloom import seeds
from fedloom.adapters.fuser import CacheFuser
from fedloom.adapters.gates import Draw, temperature
from fedloom.cards import CHECKPOINT
from fedloom.errors import Refusal, nearest
from fedloom.refining.hearing import Shelf, Turn, hear
from fedloom.refining.lessons import Encoded, digest
from fedloom.slices.slice import CacheSlice, batch_of

DECAYS = ("cosine", "linear")
_POOL = 8  # batches that are sorted by length together
_CALIBRATED_ON = 48  # lessons; some thousand tokens settle means and scales
Progress = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class TeachConfig:
    """How a fuser is taught."""

    steps: int = 300
    batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    """On matrices alone: neither gates nor biases are drawn to zero."""
    warm_up: float = 0.1
    """Share of the steps."""
    decay: str = "cosine"
    clip: float = 1.0
    last_temperature: float = 0.01
    """Of the gates, reached at the last step."""
    keep: int = 0
    """Last tokens of the sender's text that are handed over, its first one counted; 0 for all."""
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            hint = nearest(self.decay, DECAYS)
            raise Refusal(f'decay "{self.decay}"{hint}: expected one of {", ".join(DECAYS)}')
        least = min(self.steps, self.batch, self.checkpoint_every)
        if least < 1 or self.learning_rate <= 0 or not 0 <= self.warm_up < 1 or self.keep < 0:
            raise Refusal(
                f"steps = {self.steps}, batch = {self.batch}, learning rate ="
                f" {self.learning_rate}, warm-up = {self.warm_up}, keep = {self.keep}: expected 1"
                " or more, 1 or more, a rate above 0, a share below 1, and 0 or more"
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step.

        >>> [round(TeachConfig(steps=10, learning_rate=1.0).rate(s), 3) for s in (0, 1, 5, 9)]
        [1.0, 0.976, 0.5, 0.024]
        """
        rising = max(round(self.warm_up * self.steps), 1)
        done = step / self.steps
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.decay == "cosine" else 1 - done
        return self.learning_rate * min((step + 1) / rising, falling)


@dataclass(frozen=True)
class TeachReport:
    """What a training did."""

    steps: int
    loss_first: float
    """Mean of the first tenth of the steps, nats a token."""
    loss_last: float
    seconds: float
    """Of this process; a resumed run counts from where it went on."""
    resumed: int
    """Steps that a checkpoint had taken."""


def handed(shelf: Shelf, lesson: Encoded, keep: int = 0) -> CacheSlice:
    """Return what the sender hands over for a lesson: all, or its first token and its last ones."""
    whole = shelf.slice(lesson.shown_ids, lesson.shown_ends)
    if not keep or keep >= whole.tokens:
        return whole
    at = [0, *range(whole.tokens - keep + 1, whole.tokens)]
    return CacheSlice(
        whole.geometry,
        {n: x[:, at] for n, x in whole.keys.items()},
        {n: x[:, at] for n, x in whole.values.items()},
        tuple(at),
        tuple(whole.ends[i] for i in at) if whole.ends else (),
    )


def calibrate(
    fuser: CacheFuser, sender: Shelf, receiver: Shelf, lessons: Sequence[Encoded], *, seed: int
) -> None:
    """Set a fuser's means and scales from some lessons; first tokens, which are outliers, apart."""
    drawn = seeds.generator(seed, "calibration").permutation(len(lessons))[:_CALIBRATED_ON]
    some = [lessons[i] for i in drawn]
    fuser.calibrate(
        [batch_of([handed(sender, lesson)], sink=False) for lesson in some],
        [batch_of([receiver.slice(lesson.prompt_ids)], sink=False) for lesson in some],
    )


def turn_of(lesson: Encoded) -> Turn:
    """Let the receiver be asked for a lesson's answer."""
    return Turn(lesson.prompt_ids, lesson.answer_ids, lesson.prompt_ends)


def answer_loss(logits_BAV: Tensor, turns: Sequence[Turn]) -> Tensor:
    """Return the mean cross-entropy of all answers' tokens, in nats."""
    most = logits_BAV.shape[1]
    rows = [[*turn.answer, *[-100] * (most - len(turn.answer))] for turn in turns]
    labels = torch.tensor(rows, device=logits_BAV.device)
    wide = torch.promote_types(logits_BAV.dtype, torch.float32)
    return F.cross_entropy(logits_BAV.to(wide).flatten(0, 1), labels.flatten())


def teach(
    fuser: CacheFuser,
    sender: Shelf,
    receiver: Shelf,
    lessons: Sequence[Encoded],
    config: TeachConfig,
    *,
    seed: int,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> TeachReport:
    """Teach a fuser in place, from a checkpoint in ``folder`` if one is there.

    Raises
    ------
    FloatingPointError
        If a loss is not finite.
    Refusal
        If the checkpoint is of another training.
    """
    began = time.perf_counter()
    named = dict(fuser.requires_grad_(True).named_parameters())
    optimiser = _optimiser(named.values(), config)
    about = _fingerprint(fuser, lessons, config, seed)
    losses = _resume(folder, fuser, named, optimiser, about) if folder else []
    resumed = len(losses)
    fuser.train()
    for step in range(resumed, config.steps):
        batch = _batch(lessons, config.batch, step, seed)
        for group in optimiser.param_groups:
            group["lr"] = config.rate(step)
        turns = [turn_of(lesson) for lesson in batch]
        noise = torch.Generator().manual_seed(seeds.split(seed, step, "gates"))
        draw = Draw(temperature(step, config.steps, last=config.last_temperature), noise)
        given = [handed(sender, lesson, config.keep) for lesson in batch]
        loss = answer_loss(
            hear(receiver, turns, fuser, given, config=fuser.config, draw=draw), turns
        )
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss of step {step} is {loss.item()}: lower the rate")
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), config.clip)
        optimiser.step()
        losses.append(loss.item())
        if folder and (len(losses) % config.checkpoint_every == 0 or len(losses) == config.steps):
            _save(folder, fuser, named, optimiser, about, losses)
        if progress:
            progress(len(losses), loss.item())
    fuser.eval().requires_grad_(False)
    tenth = max(len(losses) // 10, 1)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    return TeachReport(len(losses), first, last, time.perf_counter() - began, resumed)


def _optimiser(parameters: Iterable[torch.nn.Parameter], config: TeachConfig) -> torch.optim.AdamW:
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in held if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def _batch(lessons: Sequence[Encoded], size: int, step: int, seed: int) -> list[Encoded]:
    """Return the lessons of one step: each epoch has every lesson once, in an order of its own."""
    per_epoch = math.ceil(len(lessons) / size)
    epoch, place = divmod(step, per_epoch)
    random = seeds.generator(seed, epoch, "order")
    order = random.permutation(len(lessons)).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), size * _POOL):
        pool = sorted(order[start : start + size * _POOL], key=lambda i: len(lessons[i].shown_ids))
        batches += [pool[i : i + size] for i in range(0, len(pool), size)]
    return [lessons[i] for i in batches[int(random.permutation(len(batches))[place])]]


def _fingerprint(
    fuser: CacheFuser, lessons: Sequence[Encoded], config: TeachConfig, seed: int
) -> dict[str, str]:
    """Say what a checkpoint must have in common with the run that goes on from it."""
    started = hashlib.sha256()
    for name, x in sorted(fuser.state_dict().items()):
        flat = x.detach().cpu().reshape(-1)  # numpy has no bfloat16: as bytes
        started.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return {
        "sender": fuser.sender.to_json(),
        "receiver": fuser.receiver.to_json(),
        "fuser": json.dumps(asdict(fuser.config), sort_keys=True),
        "training": json.dumps(asdict(config), sort_keys=True),
        "lessons": digest(lessons),
        "seed": str(seed),
        "start": started.hexdigest(),
    }


def _save(
    folder: Path,
    fuser: CacheFuser,
    named: dict[str, torch.nn.Parameter],
    optimiser: torch.optim.AdamW,
    about: dict[str, str],
    losses: list[float],
) -> None:
    tensors = {f"fuser.{n}": x.detach() for n, x in fuser.state_dict().items()}
    for name, p in named.items():
        tensors |= {f"adam.{what}.{name}": x for what, x in optimiser.state.get(p, {}).items()}
    told = {**about, "losses": json.dumps(losses)}
    data = save_tensors({n: x.cpu().contiguous() for n, x in tensors.items()}, metadata=told)
    draft = folder / f".{CHECKPOINT}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(data)
        os.replace(draft, folder / CHECKPOINT)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise Refusal(f"{folder}: {error.strerror}; expected a folder to write to") from error


def _resume(
    folder: Path,
    fuser: CacheFuser,
    named: dict[str, torch.nn.Parameter],
    optimiser: torch.optim.AdamW,
    about: dict[str, str],
) -> list[float]:
    """Put everything where a checkpoint left it and return the losses so far."""
    path = folder / CHECKPOINT
    if not path.exists():
        return []
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {n: file.get_tensor(n) for n in sorted(file.keys())}
        losses: list[float] = json.loads(told["losses"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise Refusal(f"checkpoint {path} cannot be read ({error}): remove it") from error
    for name, wanted in about.items():
        if told.get(name) != wanted:
            raise Refusal(
                f"checkpoint {path} is of a training with another {name}: use the same models, data"
                " and settings, or another folder"
            )
    fuser.load_state_dict(
        {n.removeprefix("fuser."): x for n, x in tensors.items() if n.startswith("fuser.")}
    )
    for name, p in named.items():
        kept = {
            what: tensors.get(f"adam.{what}.{name}") for what in ("step", "exp_avg", "exp_avg_sq")
        }
        if all(x is not None for x in kept.values()):
            optimiser.state[p] = {  # AdamW counts its steps on the CPU
                what: x if what == "step" or x is None else x.to(p.device)
                for what, x in kept.items()
            }
    return losses

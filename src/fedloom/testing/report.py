# SPDX-License-Identifier: Apache-2.0
"""``check_strategy`` and ``laws``: all laws at once, or each as a test of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedloom.config import RunConfig
from fedloom.errors import Refusal, nearest
from fedloom.flat import Scalar
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.testing.bench import Bench, Contribute, LawBroken
from fedloom.testing.laws import LAWS

Given = RunConfig | Mapping[str, Scalar] | None
"""A recipe, or some of its keys."""


@dataclass(frozen=True)
class Verdict:
    """What came of one law; ``broken`` says how it showed, and is empty if the law holds."""

    law: str
    promise: str
    broken: str = ""
    promised: bool = True

    def __str__(self) -> str:
        state = ("BROKEN" if self.broken else "holds") if self.promised else "not promised"
        text = f"{state:<13} {self.law}: {self.promise}"
        return f"{text}\n{'':14}{self.broken}" if self.broken else text


@dataclass(frozen=True)
class Report:
    """What came of all laws; prints as one line a law."""

    strategy: str
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        """Whether every promised law holds."""
        return not self.broken

    @property
    def broken(self) -> dict[str, str]:
        """Law -> how it was broken."""
        return {v.law: v.broken for v in self.verdicts if v.broken}

    def __str__(self) -> str:
        return "\n".join([self.strategy, *map(str, self.verdicts)])


@dataclass(frozen=True)
class Law:
    """One law for one strategy: call it, and it raises ``LawBroken`` or does nothing."""

    name: str
    bench: Bench

    def __call__(self) -> None:
        """Hold the strategy against the law.

        Raises
        ------
        LawBroken
            In one line, also if the strategy raised something else.
        """
        try:
            LAWS[self.name](self.bench)
        except (LawBroken, Refusal):
            raise
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise LawBroken(f"it raised {type(error).__name__}: {said}") from error

    @property
    def promise(self) -> str:
        """What the law says, in one line."""
        text = " ".join((inspect.getdoc(LAWS[self.name]) or "").split()).rstrip(".")
        return text[:1].lower() + text[1:]

    def __str__(self) -> str:
        return self.name


def laws(
    strategy: type[AdapterStrategy],
    config: Given = None,
    *,
    without: Iterable[str] = (),
    tolerance: float = 0.0,
    contribute: Contribute | None = None,
) -> list[Law]:
    """List what a strategy must keep, for ``pytest.mark.parametrize("law", laws(Mine), ids=str)``.

    Parameters
    ----------
    strategy
        The class; it is made anew for every round that is played.
    config
        The recipe, or keys of it.
    without
        Laws that the rule does not promise.
    tolerance
        How far results that must be the same may be apart, relative to their norm. 0 asks for the
        same bits.
    contribute
        What a made-up client sends, where normal numbers will not do.

    Raises
    ------
    Refusal
        For a law that does not exist, or a recipe that cannot be.
    """
    excused = list(without)
    for name in excused:
        if name not in LAWS:
            raise Refusal(f'law "{name}": expected one of {", ".join(LAWS)}{nearest(name, LAWS)}')
    bench = Bench(strategy, _recipe(config), tolerance=tolerance, contribute=contribute)
    return [Law(name, bench) for name in LAWS if name not in excused]


def check_strategy(
    strategy: type[AdapterStrategy],
    config: Given = None,
    *,
    without: Iterable[str] = (),
    only: Iterable[str] | None = None,
    tolerance: float = 0.0,
    contribute: Contribute | None = None,
) -> Report:
    """Hold a strategy against every law and say which it keeps; see ``laws`` for the parameters.

    Parameters
    ----------
    only
        Laws to look at; all if left out.
    """
    excused = set(without)
    held = laws(strategy, config, without=excused, tolerance=tolerance, contribute=contribute)
    wanted = set(LAWS if only is None else only)
    verdicts = []
    for law in held:
        if law.name in wanted:
            verdicts.append(Verdict(law.name, law.promise, _broken(law)))
    missing = (
        [Law(name, held[0].bench) for name in LAWS if name in excused & wanted] if held else []
    )
    verdicts += [Verdict(law.name, law.promise, promised=False) for law in missing]
    return Report(strategy.__name__, tuple(verdicts))


def _broken(law: Law) -> str:
    try:
        law()
    except (LawBroken, Refusal) as error:
        return str(error)
    return ""


def _recipe(given: Given) -> RunConfig:
    """Complete a recipe: small ranks, everyone works, and any one good reply will do."""
    if isinstance(given, RunConfig):
        config = given
    else:
        small: dict[str, Scalar] = {"lora.rank": 4, "rounds": 8}
        if (given or {}).get("method") == "faast":
            small |= {"data.task": "classes", "faast.alphas": "1.0", "faast.min-count": 1}
        config = RunConfig.from_flat({**small, **(given or {})})
    return config.replaced(sampling__fraction=1.0, sampling__min_nodes=1)

# SPDX-License-Identifier: Apache-2.0
"""What FedNL's seven clients hide, and what they ask (arXiv 2605.16350, App. C.3).

Each event states its key and then its value, close together, and the question repeats the key: an
associative memory that writes the value under the key can answer it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedloom.data.niah.words import Pools

MODULUS = 8
_STEPS = (4, 8)  # of a counter, both included


@dataclass(frozen=True)
class Event:
    """One sentence that is hidden in the haystack."""

    text: str
    key: str
    value: str
    """What stands behind the key; of a counter's step, the state after it, which is not said."""
    question: str = ""
    """What asks for the value; of a counter's event, nothing does."""

    @property
    def stem(self) -> str:
        """The sentence up to its value."""
        return self.text[: self.text.rindex(self.value)].rstrip()


@dataclass(frozen=True)
class Story:
    """The events of one haystack in their order, and the question about them."""

    events: tuple[Event, ...]
    asked: int
    """Index of the event that the question is about; of a counter, the first of all it needs."""
    question: str
    answer: str
    wrong: tuple[str, str, str]
    """Values of other events of this haystack; for a counter see ``_counter``."""
    stem: str
    """How an answer begins: the words that stood before the value."""


def tell(kind: str, pools: Pools, events: int, asked: int) -> Story:
    """Make up the events of one haystack.

    Parameters
    ----------
    kind
        One of ``fedloom.config.material.NEEDLES``.
    pools
        Where keys and values are drawn.
    events
        How many; at least four, so that the wrong options are in the haystack. A counter has its
        own number.
    asked
        Index of the event to ask about.
    """
    if kind == "counter":
        return _counter(pools)
    draw_key, draw_value, sentence, question = _SHAPES[kind]
    if draw_key is None:  # ranks: where a codeword stands says nothing about its number
        keys = [str(rank) for rank in pools.random.permutation(events) + 1]
    else:
        keys = _different(lambda: draw_key(pools), events)
    values = _different(lambda: draw_value(pools), events, keys)
    told = tuple(
        Event(sentence.format(key=key, value=value), key, value, question.format(key=key))
        for key, value in zip(keys, values, strict=True)
    )
    others = [value for index, value in enumerate(values) if index != asked]
    a, b, c = (others[i] for i in pools.random.permutation(len(others))[:3])
    asking = told[asked]
    return Story(told, asked, asking.question, asking.value, (a, b, c), asking.stem)


def shortened(story: Story, events: int, place: int) -> Story:
    """Leave out all events but so many, the asked one among them.

    The wrong options of a fact go with its event. A counter keeps its base state and what follows
    that: its answer is the state that is reached by then, its options are that state's neighbours.

    Parameters
    ----------
    place
        Where the asked event is to stand among those that stay, if there are events enough on
        both sides of it: always the last would be asked for without any memory of the others. A
        counter has no such place.
    """
    if not story.events[0].question:
        told = story.events[:events]
        turned = int(told[-1].value) - int(story.answer)
        a, b, c = (str((int(state) + turned) % MODULUS) for state in story.wrong)
        return replace(story, events=told, answer=told[-1].value, wrong=(a, b, c))
    first = min(max(0, story.asked - place), max(0, len(story.events) - events))
    return replace(story, events=story.events[first : first + events], asked=story.asked - first)


def _counter(pools: Pools) -> Story:
    """Tell a base state and four to eight steps of one, and ask for the final state modulo 8.

    The options are four neighbouring residues with the right one at any place among them: who
    misses a step finds the wrong state there, and neither the options nor the last step's
    direction tell which is right.
    """
    name, random = pools.phrase(), pools.random
    state = int(random.integers(MODULUS))
    told = [Event(f"The base state of counter {name} is {state}.", name, str(state))]
    for up in random.integers(0, 2, size=int(random.integers(_STEPS[0], _STEPS[1] + 1))):
        state = (state + (1 if up else -1)) % MODULUS
        verb = "incremented" if up else "decremented"
        told.append(Event(f"Counter {name} is {verb} by 1.", name, str(state)))
    place = int(random.integers(4))
    a, b, c = (str((state - place + i) % MODULUS) for i in range(4) if i != place)
    question = f"What is the final state of counter {name}, modulo {MODULUS}?"
    stem = f"The final state of counter {name}, modulo {MODULUS}, is"
    return Story(tuple(told), 0, question, str(state), (a, b, c), stem)


def _different(draw: Callable[[], str], count: int, apart_from: Sequence[str] = ()) -> list[str]:
    """Draw until there are so many different ones."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        if (text := draw()) not in apart_from:
            drawn[text] = None
    return list(drawn)


Draw = Callable[[Pools], str]

_SHAPES: dict[str, tuple[Draw | None, Draw, str, str]] = {
    "passkey": (
        Pools.person,
        lambda pools: pools.number(7),
        "The security passkey of Officer {key} is {value}.",
        "What is the security passkey of Officer {key}?",
    ),
    "uuid": (
        Pools.device,
        Pools.code,
        "The operational access code of device {key} is {value}.",
        "What is the operational access code of device {key}?",
    ),
    "name-date": (
        Pools.person,
        Pools.date,
        "The registration report of Officer {key} was filed on {value}.",
        "On which date was the registration report of Officer {key} filed?",
    ),
    "phrase": (
        Pools.phrase,
        Pools.phrase,
        "The activation codeword of mission {key} is {value}.",
        "What is the activation codeword of mission {key}?",
    ),
    "multi-key": (
        Pools.phrase,
        lambda pools: pools.number(4),
        "The secret of {key} is {value}.",
        "What is the secret of {key}?",
    ),
    "multi-value": (
        None,
        Pools.phrase,
        "Codeword number {key} is {value}.",
        "What is codeword number {key}?",
    ),
}
"""Kind -> draw a key (none: numbered), draw a value, the event, the question."""

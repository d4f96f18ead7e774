# SPDX-License-Identifier: Apache-2.0
"""``fedloom faast``: fast weights from text in one pass, and what they do to a language model.

Results go to stdout as one JSON object, or as text; progress and costs go to stderr.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.errors import Refusal
from fedloom.simulations.generate_cli import prompt_of
from fedloom.simulations.needs import needs_node

if TYPE_CHECKING:
    from fedloom.adapters.fast_sums import Grams, Passage
    from fedloom.adapters.fast_weights import FastMemory, ReadOut
    from fedloom.language.choosing import Choice
    from fedloom.models.base import Base
    from fedloom.rules.statistics import Gram

app = typer.Typer(
    help="Fast weights in closed form (FAAST), without training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

HELD_OUT = 8
"""One document in so many is for validation if no text is named for it."""
Model = Annotated[str, typer.Option(help="Such as embedded:smollm2-135m or hub:ORG/NAME.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Memory = Annotated[Path, typer.Option(help="File of fedloom faast compile.")]
Texts = Annotated[
    list[str],
    typer.Option("--text", help="A file, packaged:..., hub:... or path:...; repeatable."),
]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]


@app.command(name="compile")
def compile_memory(
    out: Annotated[Path, typer.Option(help="File for the memory.")],
    text: Annotated[
        list[str] | None,
        typer.Option(help="Support: a file, packaged:..., hub:... or path:...; repeatable."),
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="Support: sentence, tab, translation on each line.")
    ] = None,
    languages: Annotated[str, typer.Option(help="Of --pairs.")] = "English,German",
    answers_only: Annotated[
        bool, typer.Option("--answers-only", help="Of --pairs: learn the translations alone.")
    ] = False,
    validate: Annotated[
        list[str] | None,
        typer.Option(help="Text to choose alpha and r on; else an eighth of the support is."),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0.0, help="Filter N^-alpha; chosen if left out.")
    ] = None,
    r: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share; chosen if left out.")
    ] = None,
    readouts: Annotated[
        Path | None,
        typer.Option(help="File of fedloom faast train-readout: middle memories too."),
    ] = None,
    match_scale: Annotated[
        bool, typer.Option("--match-scale", help="Bring what is read to the stream's length.")
    ] = False,
    length: Length = 512,
    model: Model = "embedded:smollm2-135m",
    dtype: Dtype = "float32",
) -> None:
    """Compile a memory from text, and choose alpha and r of its output part on text held out."""
    if (not text) == (pairs is None):
        raise Refusal("expected --text SOURCE or --pairs FILE, one of them")
    names = tuple(name.strip() for name in languages.split(","))
    if len(names) != 2 or not all(names):
        raise Refusal(f'--languages "{languages}": expected two names with a comma between')
    with needs_node("faast"):
        from fedloom.adapters.fast_sums import compile_sums
        from fedloom.adapters.readout_files import read_readout_manifest
    began = time.perf_counter()
    trained = None if readouts is None else read_readout_manifest(readouts)
    base = loaded(model, dtype)
    last, middle = _last(base), _readouts(base, readouts)
    if pairs is None:
        documents = [_passages(base, each, length) for each in _texts(text or [])]
    else:
        documents = [[x] for x in _translations(base, pairs, names, answers_only)]
    support, held = _split(documents, needed=not validate and (alpha is None or r is None))
    if validate:
        held = [x for each in _texts(validate) for x in _passages(base, each, length)]
    sums = compile_sums(base.model, support, places=[*middle, last], readouts=middle)
    if not sums[last].count:
        raise Refusal("the support holds no two tokens in a row: expected running text")
    memory = _middle_memory(base, sums, middle, trained.alpha if trained else 1.0, match_scale)
    choice = _choose(base, sums[last], held, alpha, r, match_scale)
    told = _write(out, base, sums[last], memory, choice, alpha, r)
    typer.echo(f"{int(sums[last].count)} pairs, {time.perf_counter() - began:.1f} s", err=True)
    typer.echo(json.dumps(told))


@app.command()
def evaluate(
    memory: Memory,
    text: Texts,
    length: Length = 512,
    model: Model = "embedded:smollm2-135m",
    dtype: Dtype = "float32",
) -> None:
    """Print the perplexity of a text without the memory and with it."""
    import math

    base, hung = _hung(memory, model, dtype)
    from fedloom.language.compiling import nats, windows

    rows = [row for each in _texts(text) for row in windows(each, base.tokenizer, length)]
    if not rows:
        raise Refusal("the text holds no two tokens in a row: expected running text")
    with hung.off():
        before, tokens = nats(base, rows)
    after, _ = nats(base, rows)
    hung.detach()
    told = {
        "tokens": tokens,
        "base_perplexity": math.exp(before / tokens),
        "perplexity": math.exp(after / tokens),
        "r": hung.r,
        "memory_bytes": hung.nbytes(),
    }
    typer.echo(json.dumps(told))


@app.command()
def generate(
    memory: Memory,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from.")] = None,
    file: Annotated[str | None, typer.Option(help="File to go on from; - is stdin.")] = None,
    r: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Another share than the file's.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prompt read at once.")] = 256,
    model: Model = "embedded:smollm2-135m",
    dtype: Dtype = "float32",
) -> None:
    """Generate text with a memory; it goes to stdout as it is made."""
    asked = prompt_of(prompt, file, has_state=False)
    base, hung = _hung(memory, model, dtype)
    hung.r = hung.r if r is None else r
    from fedloom import inference

    context, began = inference.Context(base.model, chunk=chunk), time.perf_counter()
    how: dict[str, Any] = {"temperature": temperature, "seed": seed}
    for piece in inference.generate(
        context, base.tokenizer, asked, max_new_tokens=max_new_tokens, **how
    ):
        typer.echo(piece, nl=False)
    typer.echo()
    hung.detach()
    cost = {"tokens": context.tokens, "seconds": round(time.perf_counter() - began, 3)}
    typer.echo(json.dumps({**cost, "r": hung.r, "memory-bytes": hung.nbytes()}), err=True)


def _texts(sources: Sequence[str]) -> list[str]:
    from fedloom.language.compiling import read_texts

    return read_texts(sources)


def _passages(base: Base, text: str, length: int) -> list[Passage]:
    from fedloom.adapters.fast_sums import Passage
    from fedloom.language.compiling import windows

    return [Passage(row) for row in windows(text, base.tokenizer, length)]


def _translations(
    base: Base, path: Path, names: tuple[str, ...], answers_only: bool
) -> list[Passage]:
    from fedloom.language.translations import lessons, read_pairs

    both = names[0], names[1]
    return lessons(read_pairs(path), base.tokenizer, both, answers_only=answers_only)


def _split(documents: list[list[Passage]], *, needed: bool) -> tuple[list[Passage], list[Passage]]:
    """Hold one document in ``HELD_OUT`` out, or of a single one its last sequences."""
    documents = [rows for rows in documents if rows]
    if not needed:
        return [row for rows in documents for row in rows], []
    if len(documents) == 1:
        documents = [[row] for row in documents[0]]
        cut = max(len(documents) // HELD_OUT, 1)
        groups = documents[:-cut], documents[-cut:]
    else:
        every = min(HELD_OUT, len(documents))
        held = documents[every - 1 :: every]
        groups = [rows for i, rows in enumerate(documents) if (i + 1) % every], held
    support, kept = ([row for rows in group for row in rows] for group in groups)
    if not support or not kept:
        raise Refusal(
            "the support is a single sequence, so that none is left to choose alpha and r on:"
            " give --validate TEXT, or --alpha and --r"
        )
    return support, kept


def _choose(
    base: Base,
    gram: Gram,
    held: Sequence[Passage],
    alpha: float | None,
    r: float | None,
    match_scale: bool,
) -> Choice | None:
    if not held:
        return None
    from fedloom.language.choosing import ALPHAS, Reading, validate_r

    reading = Reading.of(base.model, held)
    alphas = ALPHAS if alpha is None else (alpha,)
    shares = () if r is None else (r,)
    return validate_r(gram, reading, alphas=alphas, shares=shares, match_scale=match_scale)


def _readouts(base: Base, path: Path | None) -> dict[int, ReadOut]:
    if path is None:
        return {}
    from fedloom.adapters.readout_files import load_readouts

    return load_readouts(path, base=base.base_hash, tokenizer=base.tokenizer_hash)


def _middle_memory(
    base: Base, sums: Grams, readouts: dict[int, ReadOut], alpha: float, match_scale: bool
) -> FastMemory:
    """Hang the middle memories, so that alpha and r are chosen on the stream that they leave."""
    from fedloom.adapters.fast_weights import FastMemory
    from fedloom.language.compiling import solved

    weights = solved({place: sums[place] for place in readouts}, alpha)
    return FastMemory(base.model, weights, match_scale=match_scale, readouts=readouts)


def _write(
    out: Path,
    base: Base,
    gram: Gram,
    memory: FastMemory,
    choice: Choice | None,
    alpha: float | None,
    r: float | None,
) -> dict[str, Any]:
    """Solve the output part, save all, and return what there is to say."""
    import torch

    from fedloom.adapters.fast_files import FastManifest, save_memory
    from fedloom.adapters.fast_weights import SHARE
    from fedloom.rules.solving import solve

    if choice is not None:
        best = choice.best if r is None else choice.at(r)
        alpha, r = best.alpha, best.r  # one that was given is the only one that was tried
    alpha, r = 1.0 if alpha is None else alpha, SHARE if r is None else r
    fast = solve(gram, alpha=alpha)
    memory.detach()
    memory.weights[memory.last] = torch.tensor(fast.weights, dtype=torch.float32)
    about = base.base_hash, base.tokenizer_hash, tuple(sorted(memory.weights)), gram.count
    save_memory(out, memory, FastManifest(*about, alpha, r, memory.match_scale))
    told: dict[str, Any] = {"pairs": int(gram.count), "alpha": alpha, "r": r}
    told |= {"rank": fast.rank, "explained": fast.explained, "bytes": memory.nbytes()}
    if memory.readouts:
        told["middle_places"] = sorted(memory.readouts)
    if choice is not None:
        told |= {"validation_base_perplexity": choice.base.perplexity}
        told["validation_perplexity"] = {
            f"alpha {p.alpha:g}, r {p.r:g}": p.perplexity for p in choice.curve
        }
    return told


def _hung(memory: Path, model: str, dtype: str) -> tuple[Base, FastMemory]:
    """Load a model and hang the file's memory on it."""
    with needs_node("faast"):
        from fedloom.adapters.fast_files import load_memory, read_manifest
    read_manifest(memory)  # before minutes of loading
    base = loaded(model, dtype)
    hashes = {"base": base.base_hash, "tokenizer": base.tokenizer_hash}
    return base, load_memory(memory, base.model, **hashes)


def loaded(model: str, dtype: str) -> Base:
    """Load a frozen model, or refuse in one line what is not installed."""
    with needs_node("faast"):
        from fedloom.models.base import load_base
    return load_base(model, dtype)


def _last(base: Base) -> int:
    from fedloom.adapters.fast_weights import decoder_of

    return len(decoder_of(base.model).layers)

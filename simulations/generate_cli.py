# SPDX-License-Identifier: Apache-2.0
"""``fedloom generate``: text from a run's adapter, in constant memory if it has a window.

The text goes to stdout as it is made; what it cost goes to stderr.  A state (``--save-state``)
stays on this machine.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom import states
from fedloom.config import RunConfig
from fedloom.errors import Refusal

if TYPE_CHECKING:
    from fedloom.clients.workbench import Workbench
    from fedloom.inference import Session


def generate(
    run: Annotated[Path | None, typer.Argument(help="A run's folder.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Instead of a run: a recipe, its adapter untrained.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from.")] = None,
    file: Annotated[str | None, typer.Option(help="File to go on from; - is stdin.")] = None,
    state: Annotated[Path | None, typer.Option(help="Go on from this state.")] = None,
    save_state: Annotated[Path | None, typer.Option(help="Keep the state here.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="Refuse the saved state after this: 12h, 7d, 2w.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prompt read at once.")] = 256,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe."),
    ] = None,
) -> None:
    """Generate text with a run's adapter; go on from a saved state and keep the new one."""
    text = prompt_of(prompt, file, has_state=state is not None)
    until = None if expires is None else states.lifetime(expires)
    if until is not None and save_state is None:
        raise Refusal("--expires says when a saved state ends: give --save-state too")
    if state is not None:  # before minutes of loading
        states.read_header(state)
    config = _config(run, recipe, settings or [])
    bench = _workbench(config, run)
    from fedloom import inference

    adapter, owner = bench.adapter, inference.owner_of(bench.base, bench.adapter)
    session = (
        inference.Session(adapter, chunk=chunk)
        if state is None
        else inference.load_state(state, adapter, owner, chunk=chunk)
    )
    began, before = time.perf_counter(), session.tokens
    asked: dict[str, Any] = {"temperature": temperature, "seed": seed}
    pieces = inference.generate(
        session, bench.base.tokenizer, text, max_new_tokens=max_new_tokens, **asked
    )
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()
    _say(session, session.tokens - before, time.perf_counter() - began)
    if save_state is not None:
        header = inference.save_state(save_state, session, owner, expires=until)
        ends = f", expires {header.expires}" if header.expires else ""
        typer.echo(f"state: {save_state} ({header.tokens} tokens{ends})", err=True)


def prompt_of(prompt: str | None, file: str | None, *, has_state: bool) -> str:
    """Return what to go on from, of the two options that may say so."""
    if prompt is not None and file is not None:
        raise Refusal("--prompt and --file both came: expected one of them")
    if file is not None:
        prompt = _read(file)
    if not prompt and not has_state:
        raise Refusal("nothing to go on from: give --prompt TEXT, --file FILE or --state FILE")
    return prompt or ""


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode()
    except OSError as error:
        raise Refusal(f"--file {file}: {error.strerror}; expected a text file") from error
    except UnicodeDecodeError as error:
        raise Refusal(f"--file {file} is not UTF-8 ({error.reason})") from error


def _config(run: Path | None, recipe: str | None, settings: list[str]) -> RunConfig:
    from fedloom.simulations.cli import read_recipe

    if (run is None) == (recipe is None):
        raise Refusal("expected a run's folder or --recipe RECIPE, one of them")
    if run is None:
        return read_recipe(str(recipe), settings, {})
    if not (run / "config.toml").is_file():
        raise Refusal(f"{run} has no config.toml: expected the folder of a run, or --recipe RECIPE")
    return read_recipe(str(run / "config.toml"), settings, {})


def _workbench(config: RunConfig, run: Path | None) -> Workbench:
    """Load the base and set the run's adapter on it."""
    try:
        from fedloom.clients.workbench import workbench
    except ModuleNotFoundError as error:
        if str(error.name).startswith("fedloom"):
            raise
        raise Refusal(
            f"generate needs {error.name}, which a coordinator has not: pip install 'fedloom[node]'"
        ) from error
    if run is not None and config.share != "all" and config.local.method != "none":
        raise Refusal(
            f'{run}: share = "{config.share}" leaves LoRA with its clients and the run has none to'
            " write with; expected a run that shares all"
        )
    bench = workbench(config)
    bench.adapter.reset()
    if run is not None:
        bench.adapter.load(_arrays(run, bench.base.base_hash))
    return bench


def _arrays(run: Path, base_hash: str) -> dict[str, Any]:
    """Read a run's adapter, after a look at whether it is whole and of this base."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from fedloom.wire import Manifest, arrays_digest

    folder = run / "adapter"
    arrays: dict[str, Any] = {}
    try:
        for name in ("adapter_model", "memory", "side"):
            if (folder / f"{name}.safetensors").is_file():
                arrays |= load_file(folder / f"{name}.safetensors")
        manifest = Manifest.from_json((run / "manifest.json").read_text(encoding="utf-8"))
        digest = (folder / "digest.txt").read_text(encoding="utf-8").strip()
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{run} has no whole adapter ({error}): expected a finished run") from error
    if arrays_digest(arrays) != digest:
        raise Refusal(f"{folder}: its arrays are not those of digest.txt; run the recipe again")
    if manifest.base != base_hash:
        raise Refusal(
            f"{run}: its adapter belongs to base {manifest.base[:16]}, this one is"
            f" {base_hash[:16]}; use the same model.source"
        )
    return arrays


def _say(session: Session, tokens: int, seconds: float) -> None:
    from fedloom.inference import cache_bytes

    held = cache_bytes(session.cache)
    typer.echo(
        json.dumps(
            {
                "tokens": tokens,
                "seconds": round(seconds, 3),
                "context": session.tokens,
                "memory-bytes": held["memory"],
                "attention-bytes": held["attention"],
            }
        ),
        err=True,
    )

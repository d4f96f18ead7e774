# SPDX-License-Identifier: Apache-2.0
"""``fedloom node``: the process beside a SuperNode that keeps its frozen model loaded."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fedloom.clients import warm, warm_frames, warm_server
from fedloom.errors import Refusal

app = typer.Typer(
    help="Keep a node's model loaded between messages.", no_args_is_help=True, add_completion=False
)


@app.command()
def serve(
    idle: Annotated[float, typer.Option(help="Seconds without work before it ends; 0: never.")] = 0,
) -> None:
    """Serve this node's ClientApps until stopped; start their SuperNode with FEDLOOM_WARM too."""
    if os.environ.get(warm_frames.VARIABLE) == warm_frames.OFF:
        raise Refusal(f"{warm_frames.VARIABLE} = off: this node wants no model server; unset it")
    path = warm_frames.socket_path()
    typer.echo(f"model server on {path}; SuperNodes need {warm_frames.VARIABLE}={path.parent}")
    if not warm_server.serve(path, warm.APP, idle):
        raise Refusal(f"a model server is on {path} already: fedloom node status")


@app.command()
def status() -> None:
    """Show what this node's model server has done; exit code 1 if there is none."""
    if not (said := warm.call(warm_frames.PING)):
        typer.echo(f"no model server on {warm_frames.socket_path()}")
        raise typer.Exit(1)
    for name, value in said.items():
        typer.echo(f"{name:<12} {value}")


@app.command()
def stop() -> None:
    """End this node's model server after the message it is working on; as after an upgrade."""
    said = warm.call(warm_frames.STOP)
    typer.echo(f"model server {said['pid']} is ending" if said else "no model server is there")

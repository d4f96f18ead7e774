# SPDX-License-Identifier: Apache-2.0
"""``fedloom deploy``: make a federation of real machines, bring it up, look who is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import Refusal

app = typer.Typer(
    help="Deploy a coordinator and nodes, with TLS and node keys.",
    no_args_is_help=True,
    add_completion=False,
)

Folder = Annotated[Path, typer.Argument(help="A deployment's folder, a coordinator's or a node's.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or IP of the coordinator; repeatable, nodes dial the first."),
    ] = None,
    port: Annotated[int, typer.Option(help="The coordinator's port.")] = 8000,
    node_port: Annotated[int, typer.Option(help="The first node's own, local port.")] = 9101,
    days: Annotated[int, typer.Option(help="How long the certificates are good.")] = 365,
) -> None:
    """Make certificates, node keys, settings, units and a compose file in a new folder."""
    from fedloom.simulations.deploy_init import Plan, init

    plan = Plan(nodes=nodes, hosts=host or [], port=port, node_port=node_port, days=days)
    made = init(folder, plan)
    typer.echo(f"{made.folder}: a coordinator at {plan.address} and {nodes} nodes; see README.txt")
    typer.echo(f"fedloom deploy up {folder}")
    typer.echo(f"fedloom run RECIPE --on {folder} --set clients.count={nodes}")


@app.command()
def up(
    folder: Folder,
    node: Annotated[int, typer.Option(help="This node alone, 1 and on.")] = 0,
    coordinator: Annotated[
        bool, typer.Option("--coordinator", help="The coordinator alone.")
    ] = False,
) -> None:
    """Run what the folder holds until Ctrl-C or SIGTERM (0); 1 if something ends by itself."""
    from fedloom.simulations.deploy_up import up
    from fedloom.simulations.deployment import Deployment
    from fedloom.simulations.superlink import SuperLinkError

    if node and coordinator:
        raise Refusal("--node and --coordinator: expected one of them, or none for all")
    deployment = Deployment.read(folder)
    try:
        up(deployment.parts(node, coordinator), typer.echo)
    except KeyboardInterrupt:
        typer.echo("fedloom: stopped")
    except SuperLinkError as error:
        typer.echo(f"fedloom: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def status(folder: Folder) -> None:
    """Say who is there: 0 all, 1 not all."""
    from fedloom.simulations.deploy_up import status
    from fedloom.simulations.deployment import Deployment
    from fedloom.simulations.superlink import SuperLinkError

    try:
        rows, good = status(Deployment.read(folder))
    except SuperLinkError as error:
        typer.echo(f"fedloom: {error}", err=True)
        raise typer.Exit(1) from None
    for label, state in rows:
        typer.echo(f"{label:<12} {state}")
    raise typer.Exit(int(not good))


@app.command()
def health(folder: Folder) -> None:
    """Ask the parts on this machine for their health, for containers: 0 healthy, 1 not."""
    from fedloom.simulations.deployment import Deployment

    bad = [part.label for part in Deployment.read(folder).parts() if not part.healthy()]
    if bad:
        typer.echo(f"not healthy: {', '.join(bad)}", err=True)
    raise typer.Exit(int(bool(bad)))

# SPDX-License-Identifier: Apache-2.0
"""``fedloom run RECIPE --on DIR``: the same run, on a SuperLink that ``fedloom deploy up`` keeps.

The ServerApp runs on the coordinator's machine and writes the run's folder there.  Submitted on
that machine, which is all that a coordinator allows by default, the folder is at hand as in a
simulation; submitted from elsewhere, what comes back is the outcome and the log.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.flat import Scalar
from fedloom.simulations.deploy_up import connection
from fedloom.simulations.deployment import HERE, Coordinator, Deployment, answers
from fedloom.simulations.progress import Picture
from fedloom.simulations.superlink import (
    LocalSuperLink,
    SuperLinkError,
    environment,
    write_app,
)

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
PENDING_SECONDS = 180.0  # its machine may be small, and busy with another run


class DeployedSuperLink(LocalSuperLink):
    """Ask what is asked of a SuperLink of our own of one that is somebody else's to start and end.

    Parameters
    ----------
    coordinator
        Where it is.
    log
        Name for what cannot be read from here.
    """

    def __init__(self, coordinator: Coordinator, log: Path) -> None:
        super().__init__(log, pending_seconds=PENDING_SECONDS)
        self.address = coordinator.local if coordinator.control == HERE else coordinator.address
        self.certificate = coordinator.certificate
        self._submitted = ""
        self._healthy = self._looked = 0.0

    def submit(
        self, app: Path, config: Mapping[str, Scalar] | None = None, federation: str = ""
    ) -> str:
        """Hand over an app; the run is stopped if we leave before its end."""
        self._submitted = super().submit(app, config, federation)
        return self._submitted

    def status(self, run_id: str) -> tuple[str, str]:
        """Return the run's status and its details."""
        told = super().status(run_id)
        if told[0].startswith("finished"):
            self._submitted = ""
        return told

    def check(self) -> bool:
        """Look now and then whether the coordinator answers; raise if it has not for a while."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            if answers(f"https://{self.address}/health", self.certificate):
                self._healthy = time.monotonic()
            elif now - self._healthy > PATIENCE_SECONDS:
                raise SuperLinkError(f"the coordinator at {self.address} has gone")
        return True

    def close(self) -> None:
        """Stop a run that has not ended; the SuperLink stays."""
        if self._submitted:
            run, self._submitted = self._submitted, ""
            with contextlib.suppress(SuperLinkError):
                self._flwr("stop", run)
        super().close()

    def _start(self) -> None:
        self._environment = environment(self.folder)
        connection(self.folder / "home", self.address, self.certificate)
        if not answers(f"https://{self.address}/health", self.certificate):
            raise SuperLinkError(
                f"no coordinator answers at {self.address}: start it with `fedloom deploy up`, and"
                " submit on its machine"
            )
        self._healthy = self._looked = time.monotonic()


def check_deployment(config: RunConfig, deployment: Deployment) -> None:
    """Refuse a recipe for more clients than there are nodes.

    Raises
    ------
    Refusal
        Saying what to set.
    """
    nodes = len(deployment.required().public_keys())
    if config.clients.count > nodes:
        raise Refusal(
            f"clients.count = {config.clients.count}: {deployment.folder} has {nodes} nodes; --set"
            f" clients.count={nodes}, or init a deployment with more"
        )


def run_deployed(deployment: Deployment) -> Callable[[RunConfig, Path, Picture], str]:
    """Return how a recipe is run on a deployment: why it failed, or nothing."""

    def run(config: RunConfig, folder: Path, picture: Picture) -> str:
        coordinator = deployment.required()
        try:
            with DeployedSuperLink(coordinator, folder / "superlink.log") as link:
                run_id = link.submit(write_app(link.folder / "app", config))
                status, details = link.wait(
                    run_id, lambda: bool(picture.status or picture.refusal), poll_seconds=1.0
                )
                completed = status == "finished:completed"
                if not completed or picture.failures or picture.status != "completed":
                    (folder / "run.log").write_text(link.run_log(run_id), encoding="utf-8")
        except SuperLinkError as error:
            return str(error)
        if completed and not (folder / "events.jsonl").exists():
            _tell_where(folder)
        return "" if completed else picture.reason or details or status

    return run


def _tell_where(folder: Path) -> None:
    """Write the end of a run whose events are on another machine's disk."""
    about = f"the rest of this run is on the coordinator's machine, in {folder}"
    row = {"event": "end", "status": "completed", "reason": about}
    (folder / "events.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")

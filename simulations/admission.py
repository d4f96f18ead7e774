# SPDX-License-Identifier: Apache-2.0
"""What a machine of a federation lets in: apps without code, and orders from where they may come.

Flower runs the code that an app brings: whoever may submit an app may run code on every node.  And
its SuperLink takes orders (submit, register a node) from whoever reaches the port that nodes dial.
Here ``flwr-clientapp`` and ``flwr-serverapp`` are started through this module, which looks at the
app before a byte of it is unpacked, and ``flower-superlink`` with a gate before its routes.  Both
fail closed: where Flower has changed so that a gate has no place, nothing is run.
"""

from __future__ import annotations

import importlib
import io
import ipaddress
import re
import shlex
import sys
import tomllib
import zipfile
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fedloom.errors import Refusal

COMPONENTS = {
    "clientapp": "fedloom.simulations.client_app:app",
    "serverapp": "fedloom.simulations.server_app:app",
}
RUNNERS = {
    "flwr-clientapp": "flwr.supernode.runtime.run_clientapp",
    "flwr-serverapp": "flwr.superlink.runtime.run_serverapp",
}
"""Flower's commands that run an app, and the module of each that unpacks it."""
OTHERS = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")
"""Flower's other tasks; none of them is any of ours."""
APP_BYTES = 1_000_000

Scope = MutableMapping[str, Any]
Send = Callable[[Scope], Awaitable[None]]
Receive = Callable[[], Awaitable[Scope]]


def check_app(data: bytes) -> None:
    """Refuse an app (a FAB) that is anything but a choice for what is installed here.

    Raises
    ------
    Refusal
        If it holds a file that is no TOML, or names another program than fedloom's.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_names([entry.filename for entry in entries])
            if sum(entry.file_size for entry in entries) > APP_BYTES:
                raise Refusal(f"the app unpacks to over {APP_BYTES} bytes: expected one TOML file")
            tree = tomllib.loads(archive.read("pyproject.toml").decode())
        named = dict(tree["tool"]["flwr"]["app"]["components"])
    except Refusal:
        raise
    except Exception as error:  # foreign bytes: unpacking and parsing raise all kinds
        raise Refusal(
            f"the app cannot be read ({type(error).__name__}): expected a Flower app of one TOML"
            " file, as `fedloom run --on` submits"
        ) from error
    if named != COMPONENTS:
        shown = repr(" ".join(sorted(f"{k}={v}" for k, v in named.items())))[1:-1][:120]
        raise Refusal(
            f"the app names {shown}: this machine runs fedloom's own apps only; submit with"
            " `fedloom run --on`"
        )


def _check_names(names: list[str]) -> None:
    bad = [n for n in names if not re.fullmatch(r"[A-Za-z0-9_-]+\.toml|\.info/CONTENT", n)]
    if bad or len(set(names)) != len(names):
        what = f"brings {repr(bad[0])[1:-1][:80]}" if bad else "names a file twice"
        raise Refusal(
            f"the app {what}: this machine runs only what is installed on it and takes an app of"
            ' TOML alone; its owner may set code = "allow"'
        )


class FromHere:
    """Let only this machine give orders to a SuperLink; from elsewhere nodes are heard, no more.

    An ASGI layer.  In the same way task tokens are handed out to this machine alone: in the mode in
    which a SuperLink starts its own processes, Flower asks for no secret.
    """

    OPEN = ("/v1/fleet/", "/health")

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to whoever may not ask."""
        if scope["type"] != "http" or self._may(scope):
            await self._app(scope, receive, send)
            return
        said = b'control = "here": orders are taken on the coordinator\'s machine only'
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    def _may(self, scope: Scope) -> bool:
        if str(scope.get("path", "")).startswith(self.OPEN):
            return True
        try:
            return ipaddress.ip_address(str(scope["client"][0])).is_loopback
        except (KeyError, TypeError, ValueError):  # not said: then it is nobody we know
            return False


def write_gates(folder: Path) -> Path:
    """Write commands of Flower's names that come through here; for the front of a PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    python = shlex.quote(sys.executable)
    for name in (*RUNNERS, *OTHERS):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {python} -P -m {__name__} {name} "$@"\n', "utf-8")
        script.chmod(0o755)
    return folder


def through(command: str) -> list[str]:
    """Return how one of Flower's commands is started through the gates."""
    return [sys.executable, "-P", "-m", __name__, command]


def _place_gate(command: str) -> None:
    if command == "flower-superlink":
        from flwr.superlink import extensions
        from starlette.middleware import Middleware

        before = extensions.get_middleware  # absent in another Flower: then nothing starts
        extensions.get_middleware = lambda: (Middleware(FromHere), *before())
        return
    if command not in RUNNERS:
        raise Refusal(f"{command} is refused: this machine runs fedloom's own apps only")
    module: Any = importlib.import_module(RUNNERS[command])
    unpack = module.install_from_fab

    def checked(content: Any, *arguments: Any, **options: Any) -> Path:
        check_app(content)
        return Path(unpack(content, *arguments, **options))

    module.install_from_fab = checked


def main() -> None:
    """Run one of Flower's commands behind its gate."""
    sys.argv = sys.argv[1:]
    try:
        _place_gate(sys.argv[0])
    except Refusal as refusal:
        sys.exit(f"fedloom: {refusal}")
    (entry,) = metadata.entry_points(group="console_scripts", name=sys.argv[0])
    sys.exit(entry.load()())


if __name__ == "__main__":
    main()

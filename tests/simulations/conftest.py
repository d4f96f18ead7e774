from __future__ import annotations

from collections.abc import Callable

import pytest

from fedloom.simulations import cli


@pytest.fixture
def fedloom(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call

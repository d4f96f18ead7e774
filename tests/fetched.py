# SPDX-License-Identifier: Apache-2.0
"""Which packaged data this machine can have: some comes by npm or apt-get, some is very large."""

from __future__ import annotations

import shutil

import pytest

from fedloom import archives


def skip_without(source: str) -> None:
    """Skip a test whose data cannot be fetched here, saying why."""
    if source == "packaged:cifar10":
        archive = archives.BIGBENCH
        if not (archives.cache_dir() / "archives" / archive.filename).is_file():
            pytest.skip(f"{source} is in {archive.size_bytes / 1e6:.0f} MB that nobody fetched yet")
        return
    tool = {"packaged:uci-sentences": "npm", "packaged:fashion-mnist": "apt-get"}.get(source)
    if tool and shutil.which(tool) is None:
        pytest.skip(f"{source} comes by {tool}, which is not here")

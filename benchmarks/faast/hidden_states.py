"""Documents of three kinds and what the frozen model makes of them, read once and kept on disk.

A forward pass is nearly all of what the language study costs, and splits, filters and shares change
nothing about it.  Run as ``python benchmarks/faast/hidden_states.py --cache DIR``; ``language.py``
does the same for what is missing.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fedloom.adapters.fast_sums import Passage
from fedloom.data.text import load_text
from fedloom.language.choosing import Reading
from fedloom.models.base import Base, load_base

CORPORA = ("packaged:austen", "packaged:wikipedia", "python:library")
SOURCE = "embedded:smollm2-135m"


@dataclass(frozen=True)
class Document:
    """One text's tokens and states."""

    name: str
    ids: tuple[int, ...]
    hidden_ND: torch.Tensor
    """Before the final norm, at each token but the last."""


def choose(
    base: Base, corpus: str, count: int, length: int, of: int = 80
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the first ``count`` of ``of`` documents that are spread evenly over the corpus.

    They are cut to ``length`` tokens, and shorter ones are left out.  Articles are taken once each;
    of novels passages are taken.
    """
    fit = []
    for name, text in texts(corpus).items():
        ids = base.tokenizer.encode(text[: 8 * length])
        if len(ids) >= length:
            fit.append((name, tuple(ids[:length])))
    of = min(of, len(fit))
    return [fit[i * len(fit) // of] for i in range(min(count, of))]


def texts(corpus: str) -> dict[str, str]:
    """Name a corpus's documents; of each module of Python's library, what follows its middle."""
    if corpus == "python:library":
        found = {}
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            found[file.stem] = "".join(lines[len(lines) // 2 :])
        return found
    made: dict[str, str] = {}
    for each in load_text(corpus):
        name = each.work if corpus == "packaged:wikipedia" else f"{each.work}-{each.part}"
        made.setdefault(name, " ".join(each.sentences))
    return made


def document(base: Base, corpus: str, name: str, ids: tuple[int, ...], cache: Path) -> Document:
    """Read one document, or take it from the cache."""
    plain = "".join(c if c.isalnum() else "-" for c in f"{corpus}-{name}-{len(ids)}")
    file = cache / f"{plain}.safetensors"
    if not file.exists():
        hidden = Reading.of(base.model, [Passage(ids)]).hidden_ND
        cache.mkdir(parents=True, exist_ok=True)
        save_file({"hidden": hidden.clone(), "ids": torch.tensor(ids)}, file)
    kept = load_file(file)
    assert tuple(kept["ids"].tolist()) == ids
    return Document(name, ids, kept["hidden"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--documents", type=int, default=63)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = load_base(args.source)
    chosen = {corpus: choose(base, corpus, args.documents, args.length) for corpus in CORPORA}
    for index in range(args.documents):
        for corpus, rows in chosen.items():
            if index < len(rows):
                began = time.process_time()
                document(base, corpus, *rows[index], args.cache)
                print(
                    f"{corpus} {rows[index][0]} {time.process_time() - began:.1f} CPU s", flush=True
                )


if __name__ == "__main__":
    main()

"""Perplexity with an output memory against base, kNN-LM, a unigram mixture and LoRA, on real text.

Documents of one kind (Wikipedia articles, passages of novels, Python modules) are dealt into
support and test, anew for each split.  All that a method has to choose is chosen once, on
validation documents that are in no split, with the first split's support; intervals are bootstraps
over test documents, a document's tokens of all splits together.  ``--parts lora readout`` adds, on
the first split of one corpus, what needs back-propagation.  The model reads each document once and
its states are kept (``--cache``), so that a run that is cut short goes on.  The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hidden_states import CORPORA, SOURCE, Document, choose, document
from language_taught import PARTS, Scores, Split

from fedloom import seeds
from fedloom.adapters.fast_weights import FastMemory, decoder_of
from fedloom.language.choosing import Point, Reading, validate_r
from fedloom.models.base import Base, load_base
from fedloom.rules.paper_bank import PaperBank
from fedloom.rules.solving import Factorisation, solve
from fedloom.rules.statistics import Gram

ALPHAS = (0.2, 0.3, 0.4, 1.0)
MATCHED = (0.005, 0.01, 0.02, 0.05)
SHARES = (0.3, 0.6, 0.8, 0.9, 0.95, 0.97, 0.99)
RIDGES = (1e-3, 1e-2)  # of the largest eigenvalue
NEIGHBOURS = 64
TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the median squared distance to a neighbour
KNN_WEIGHTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
UNIGRAM_WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)


def deal(documents: Sequence[Document], seed: int, validation: int, test: int) -> Split:
    """Deal support and test anew for each seed; validation is the same and in neither."""
    order = seeds.generator(0, "faast", "language").permutation(len(documents)).tolist()
    held, rest = order[:validation], order[validation:]
    again = seeds.generator(seed, "faast", "language", "split").permutation(len(rest)).tolist()
    picked = [documents[rest[i]] for i in again]
    return Split(picked[test:], [documents[i] for i in held], picked[:test])


def reading(base: Base, documents: Sequence[Document]) -> Reading:
    targets = torch.tensor([token for d in documents for token in d.ids[1:]])
    return Reading(base.model, torch.cat([d.hidden_ND for d in documents]), targets)


@torch.inference_mode()
def pairs(base: Base, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
    table = base.model.get_input_embeddings()
    values = [table(torch.tensor(d.ids[1:])) for d in documents]
    return torch.cat([d.hidden_ND for d in documents]).numpy(), torch.cat(values).numpy()


def by_document(nats_N: torch.Tensor, documents: Sequence[Document]) -> list[float]:
    sizes = [len(d.ids) - 1 for d in documents]
    return [float(part.sum()) for part in nats_N.split(sizes)]


def tensor(weights: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(weights).float()


@dataclass(frozen=True)
class Settings:
    """What validation chose, once for a corpus, on the support of the first split."""

    alpha: float
    r: float
    ridge: float
    r_ridge: float
    temperature: float
    weight: float
    unigram: float


def settle(base: Base, split: Split) -> tuple[Settings, dict[str, Any]]:
    """Choose everything that can be chosen on the validation documents."""
    gram = Gram.of(*pairs(base, split.support))
    factorised, held = Factorisation.of(gram), reading(base, split.validation)
    top = float(factorised.sigma[0]) ** 2
    solved = [factorised.solve(alpha=alpha) for alpha in ALPHAS]
    solved += [factorised.solve(alpha=None, ridge=ridge * top) for ridge in RIDGES]
    found = held.sweep([tensor(x.weights) for x in solved], SHARES)
    plain = float(held.nats(None, 0.0).mean())
    swept = {
        (name, r): nats
        for name, row in zip((*ALPHAS, *RIDGES), found, strict=True)
        for r, nats in zip(SHARES, row, strict=True)
    }
    alpha, r = min(((a, r) for a in ALPHAS for r in SHARES), key=lambda key: swept[key])
    r = r if swept[alpha, r] < plain else 0.0  # the base, if nothing is better
    ridge = min(((x, r) for x in RIDGES for r in SHARES), key=lambda key: swept[key])
    matched = validate_r(gram, held, alphas=(alpha,), shares=MATCHED, match_scale=True)
    side = Side.of(base, split.support, split.validation)
    unit = float(side.far.median())
    grid = [(t * unit, w) for t in TEMPERATURES for w in KNN_WEIGHTS]
    knn = min(grid, key=lambda tw: float(side.knn(*tw).mean()))
    unigram = min(UNIGRAM_WEIGHTS, key=lambda w: float(side.unigram(w).mean()))
    settings = Settings(alpha, r, *ridge, *knn, unigram)
    told: dict[str, Any] = {"chosen": asdict(settings), "base": round(math.exp(plain), 3)}
    for name, fast in zip((*ALPHAS, *RIDGES), solved, strict=True):
        kind = "alpha" if name in ALPHAS else "ridge"
        told[f"{kind} {name:g}, rank {fast.rank}"] = {
            f"{r:g}": round(math.exp(swept[name, r]), 3) for r in SHARES
        }
    told["scale matched"] = curve(matched.curve)
    return settings, told


def curve(points: Iterable[Point]) -> dict[str, float]:
    return {f"{p.r:g}": round(p.perplexity, 3) for p in points}


def score(base: Base, split: Split, chosen: Settings) -> tuple[Scores, dict[str, Any]]:
    """Score test documents under settings that never saw them."""
    began = time.process_time()
    keys, values = pairs(base, split.support)
    factorised = Factorisation.of(Gram.of(keys, values))
    fast = factorised.solve(alpha=chosen.alpha)
    spent = time.process_time() - began
    top = float(factorised.sigma[0]) ** 2
    ridge = factorised.solve(alpha=None, ridge=chosen.ridge * top).weights
    bank = PaperBank(alpha=chosen.alpha, capacity=4096, chunk=4096)
    bank.add(keys, values)
    test, side = reading(base, split.test), Side.of(base, split.support, split.test)
    found = {
        "base": -side.plain.log(),
        "output memory": test.nats(tensor(fast.weights), chosen.r),
        "ridge in place of the filter": test.nats(tensor(ridge), chosen.r_ridge),
        "mean of chunks (Eq. 14)": test.nats(tensor(bank.weights()), chosen.r),
        "kNN-LM": side.knn(chosen.temperature, chosen.weight),
        "unigram of the support": side.unigram(chosen.unigram),
    }
    told = {"pairs": len(keys), "rank": fast.rank, "explained": round(fast.explained, 4)}
    told["sums_and_solve_cpu_seconds"] = round(spent, 2)
    return {name: by_document(x, split.test) for name, x in found.items()}, told


@dataclass(frozen=True)
class Side:
    """What kNN-LM (arXiv 1911.00172, states behind the final norm) and unigrams need of a text."""

    plain: torch.Tensor
    """The base model's probability of each token."""
    far: torch.Tensor
    """Squared distances to the nearest support states."""
    right: torch.Tensor
    """Whether the token after each of those is the one that came."""
    share: torch.Tensor
    """Of each token in the support."""

    @classmethod
    @torch.inference_mode()
    def of(cls, base: Base, support: Sequence[Document], asked: Sequence[Document]) -> Side:
        """Look the asked texts' states up among the support's."""
        norm = decoder_of(base.model).norm
        kept, queries = (norm(torch.cat([d.hidden_ND for d in x])) for x in (support, asked))
        tokens, wanted = targets(support), targets(asked)
        far, index = nearest(queries, kept)
        share = torch.bincount(tokens, minlength=base.model.config.vocab_size).double() + 0.01
        plain = (-reading(base, asked).nats(None, 0.0)).exp()
        right = (tokens[index] == wanted[:, None]).double()
        return cls(plain, far.double(), right, (share / share.sum())[wanted])

    def knn(self, temperature: float, weight: float) -> torch.Tensor:
        """Return each token's cross-entropy when neighbours vote."""
        said = (torch.softmax(-self.far / temperature, dim=1) * self.right).sum(1)
        return -((1 - weight) * self.plain + weight * said).log()

    def unigram(self, weight: float) -> torch.Tensor:
        """Return each token's cross-entropy when the support's frequencies are mixed in."""
        return -((1 - weight) * self.plain + weight * self.share).log()


def targets(documents: Sequence[Document]) -> torch.Tensor:
    return torch.tensor([token for d in documents for token in d.ids[1:]])


def nearest(queries: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared distances and places of the nearest support states of each query."""
    far, index = [], []
    for part in queries.split(256):
        found = torch.cdist(part, kept).topk(NEIGHBOURS, largest=False)
        far.append(found.values**2)
        index.append(found.indices)
    return torch.cat(far), torch.cat(index)


def laws(base: Base, documents: Sequence[Document]) -> dict[str, bool]:
    """On the real model: r = 0 is the base, and no token tells those before it."""
    gram = Gram.of(*pairs(base, documents[:8]))
    ids = torch.tensor([documents[0].ids[:32]])
    with torch.inference_mode():
        plain = base.model(ids, use_cache=False).logits
        last = len(decoder_of(base.model).layers)
        memory = FastMemory(base.model, {last: solve(gram).weights}, r=0.0)
        silent = base.model(ids, use_cache=False).logits
        memory.r = 0.9
        heard = base.model(ids, use_cache=False).logits
        changed = ids.clone()
        changed[0, 20] += 1
        after = base.model(changed, use_cache=False).logits
        memory.detach()
        restored = base.model(ids, use_cache=False).logits
    return {
        "r0_bit_equal": torch.equal(plain, silent),
        "detached_bit_equal": torch.equal(plain, restored),
        "causal_bit_equal": torch.equal(heard[:, :20], after[:, :20]),
        "heard": not torch.equal(plain, heard),
    }


def summary(scores: list[tuple[Split, Scores]]) -> dict[str, dict[str, Any]]:
    """Perplexity and its ratio to the base's, with a bootstrap over documents."""
    rows: dict[str, dict[str, list[tuple[float, float, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for split, found in scores:
        for name, values in found.items():
            for doc, plain, value in zip(split.test, found["base"], values, strict=True):
                rows[name][doc.name].append((plain, value, len(doc.ids) - 1))
    told = {}
    for name, by_name in rows.items():
        sums = np.array([np.sum(parts, axis=0) for parts in by_name.values()])
        draws = seeds.generator(0, "bootstrap").integers(len(sums), size=(2000, len(sums)))
        drawn = sums[draws].sum(axis=1)
        plain, value, tokens = sums.sum(axis=0)
        ratios = np.exp((drawn[:, 1] - drawn[:, 0]) / drawn[:, 2])
        told[name] = {
            "perplexity": round(math.exp(value / tokens), 3),
            "ratio": round(math.exp((value - plain) / tokens), 4),
            "ratio_95": [round(float(x), 4) for x in np.quantile(ratios, (0.025, 0.975))],
            "documents": len(sums),
            "tokens": int(tokens),
        }
    return told


def study(base: Base, corpus: str, args: argparse.Namespace) -> dict[str, Any]:
    chosen = choose(base, corpus, args.documents, args.length)
    documents = [document(base, corpus, *each, args.cache) for each in chosen]
    splits = [deal(documents, s, args.validation, args.test) for s in range(args.splits)]
    settings, validated = settle(base, splits[0])
    print(f"{corpus}: {json.dumps(validated)}", flush=True)
    told: dict[str, Any] = {"documents": len(documents), "validation": validated, "splits": []}
    scores: list[tuple[Split, Scores]] = []
    for number, split in enumerate(splits):
        found, about = score(base, split, settings)
        told["splits"].append(about)
        for part, run in PARTS.items():
            if part in args.parts and number == 0 and corpus == args.trained:
                print(f"{corpus}: {part}", flush=True)
                more, told[part] = run(base, split, args)
                found |= more
        scores.append((split, found))
        print(f"{corpus} split {number}: {json.dumps(told['splits'][-1])}", flush=True)
    told["rows"] = summary(scores)
    if args.parts:
        told["rows_of_split_0"] = summary(scores[:1])
    told["laws"] = laws(base, documents)
    print(f"{corpus}: {json.dumps(told)}", flush=True)
    return told


def table(told: dict[str, Any]) -> str:
    lines = ["| method | perplexity | over the base's | 95 % |", "| --- | --- | --- | --- |"]
    for name, row in told.items():
        low, high = row["ratio_95"]
        lines.append(
            f"| {name} | {row['perplexity']:.2f} | {row['ratio']:.4f} | {low:.4f} to {high:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--corpora", nargs="+", default=list(CORPORA))
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "faast-language"
    )
    parser.add_argument("--documents", type=int, default=63)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--validation", type=int, default=3)
    parser.add_argument("--test", type=int, default=8)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=[])
    parser.add_argument("--trained", default="packaged:austen", help="corpus of --parts")
    parser.add_argument("--rank", type=int, default=6)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--readout-rate", type=float, default=1e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    base = load_base(args.source)
    found = {corpus: study(base, corpus, args) for corpus in args.corpora}
    for corpus, told in found.items():
        print(f"\n{corpus}\n\n{table(told['rows'])}")
        if args.parts and corpus == args.trained:
            print(f"\n{corpus}, first split\n\n{table(told['rows_of_split_0'])}")
    about = {
        "source": args.source,
        "length": args.length,
        "cpu_seconds": round(time.process_time() - began, 1),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    print("\n" + json.dumps(found | about))


if __name__ == "__main__":
    main()

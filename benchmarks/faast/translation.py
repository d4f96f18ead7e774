# SPDX-License-Identifier: Apache-2.0
"""Translation with an output memory on a language model: nats per token, and greedy answers.

Support is sentence pairs as prompts, of which the translations' tokens alone are learnt; alpha and
r are chosen on validation pairs, as ``fedloom faast compile --answers-only`` does.  The control's
support has the same sentences and translations, but every sentence has another's: what it gains
too is the language and the subject, not translation.  It chooses its own alpha and r.  Test pairs
are the same for all seeds; seeds draw the support.  Run as ``python benchmarks/faast/translation.py
[--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import ArrayLike, NDArray
from translation_pairs import MADE_UP, TASKS, Pair, dealt, drawn, sentence_pairs, shuffled

from fedloom.adapters.fast_sums import Passage, compile_sums
from fedloom.adapters.fast_weights import SHARE, FastMemory, decoder_of
from fedloom.inference import Context, generate
from fedloom.intervals import Interval
from fedloom.language.choosing import Reading, validate_r
from fedloom.language.translations import LANGUAGES, lessons, prompt
from fedloom.models.base import Base, load_base
from fedloom.paired import crossed_bootstrap
from fedloom.rules.solving import solve

try:  # not among the package's dependencies
    import sacrebleu
except ImportError:
    sacrebleu = None

QUICK = {
    "source": "tiny:gemma3",  # its head is its embeddings: a memory is heard even there
    "tasks": MADE_UP,
    "support": 24,
    "validation": 6,
    "test": 8,
    "generate": 2,
    "longest": 24,
    "seeds": 2,
}
KINDS = ("memory", "shuffled")


@dataclass(frozen=True)
class Compiled:
    """An output memory with what validation chose for it."""

    weights_DD: NDArray[Any]
    alpha: float
    r: float
    told: dict[str, float]


def taught(base: Base, pairs: Sequence[Pair], args: argparse.Namespace) -> list[Passage]:
    return lessons(pairs, base.tokenizer, args.languages, answers_only=True)


def compiled(
    base: Base, support: Sequence[Pair], held: Reading, args: argparse.Namespace
) -> Compiled:
    place, began = len(decoder_of(base.model).layers), time.process_time()
    gram = compile_sums(base.model, taught(base, support, args), places=[place])[place]
    summed = time.process_time() - began
    choice = validate_r(gram, held)
    fast = solve(gram, alpha=choice.best.alpha)
    told = {
        "alpha": choice.best.alpha,
        "r": choice.best.r,
        "tokens": int(gram.count),
        "rank": fast.rank,
        "validation_base_perplexity": round(choice.base.perplexity, 3),
        "validation_perplexity": round(choice.best.perplexity, 3),
        "sums_cpu_seconds": round(summed, 1),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    return Compiled(fast.weights, choice.best.alpha, choice.best.r, told)


def by_sentence(
    test: Reading, sizes: Sequence[int], memory: Compiled | None
) -> NDArray[np.float64]:
    """Return each translation's nats, and of them its last token's, which ends the line."""
    weights, r = (None, 0.0) if memory is None else (memory.weights_DD, memory.r)
    read = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    parts = test.nats(read, r).split(list(sizes))
    return np.array([[float(part.sum()), float(part[-1])] for part in parts])


def per_token(nats_SR: ArrayLike, tokens_R: Sequence[int]) -> Interval:
    """Give an interval for all nats over all tokens, with sentences and seeds drawn anew.

    A draw of sentences draws their tokens too.  The ratio of two sums is taken as its tangent, by
    sentence, so that a mean over sentences stands for it.
    """
    nats, tokens = np.asarray(nats_SR, np.float64), np.asarray(tokens_R, np.float64)
    ratio = nats.mean(0).sum() / tokens.sum()
    return crossed_bootstrap(ratio + (nats - ratio * tokens) / tokens.mean(), seed=0)


def figures(
    found: dict[str, list[NDArray[np.float64]]], tokens: Sequence[int], over: str, kind: str
) -> dict[str, Any]:
    """Hold a kind's seeds against another's, sentence by sentence."""
    other, mine = (np.stack(found[name]) for name in (over, kind))
    gap = mine - other
    told = per_token(gap[..., 0], tokens)
    last = crossed_bootstrap(gap[..., 1], seed=0)
    return {
        f"nats_over_{over}": [round(x, 4) for x in (told.value, told.low, told.high)],
        f"ratio_over_{over}": [round(math.exp(x), 4) for x in (told.value, told.low, told.high)],
        f"last_token_over_{over}": [round(x, 4) for x in (last.value, last.low, last.high)],
    }


def likelihood(
    found: dict[str, list[NDArray[np.float64]]], tokens: Sequence[int]
) -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = {}
    for kind, rows in found.items():
        nats = float(np.stack(rows)[..., 0].sum() / len(rows) / sum(tokens))
        told[kind] = {"nats": round(nats, 4), "perplexity": round(math.exp(nats), 3)}
        if kind != "base":
            told[kind] |= figures(found, tokens, "base", kind)
    told["memory"] |= figures(found, tokens, "shuffled", "memory")
    return told


@torch.inference_mode()
def laws(base: Base, passages: Sequence[Passage], memory: Compiled) -> dict[str, Any]:
    """On the real model: r = 0 is the base, and what hangs there scores as the study does."""

    def logits() -> list[torch.Tensor]:
        rows = [torch.tensor([p.ids]) for p in passages]
        return [base.model(ids, use_cache=False).logits for ids in rows]

    plain, r = logits(), memory.r or SHARE
    place = len(decoder_of(base.model).layers)
    hung = FastMemory(base.model, {place: memory.weights_DD}, r=0.0)
    silent = logits()
    hung.r = r
    heard = [
        F.cross_entropy(x[0, p.first - 1 : -1].float(), torch.tensor(p.ids[p.first :]))
        for x, p in zip(logits(), passages, strict=True)
    ]
    hung.detach()
    equal = [torch.equal(a, b) for a, b in zip(plain, silent, strict=True)]
    restored = [torch.equal(a, b) for a, b in zip(plain, logits(), strict=True)]
    weights = torch.tensor(memory.weights_DD, dtype=torch.float32)
    scored = [Reading.of(base.model, [p]).nats(weights, r).mean() for p in passages]
    gaps = [abs(float(a) - float(b)) for a, b in zip(heard, scored, strict=True)]
    return {
        "r0_bit_equal": all(equal),
        "detached_bit_equal": all(restored),
        "largest_gap_to_hung": float(f"{max(gaps):.2g}"),
    }


def answers(
    base: Base, sentences: Sequence[str], memory: Compiled | None, args: argparse.Namespace
) -> list[str]:
    """Translate greedily: the first line that is said, so many tokens long at most."""
    place, made = len(decoder_of(base.model).layers), []
    hung = memory and FastMemory(base.model, {place: memory.weights_DD}, r=memory.r)
    for sentence in sentences:
        said, asked = "", prompt(sentence, args.languages)
        for piece in generate(
            Context(base.model), base.tokenizer, asked, max_new_tokens=args.longest
        ):
            said += piece
            if "\n" in said.lstrip():
                break
        made.append(said.strip().partition("\n")[0].strip())
    if hung:
        hung.detach()
    return made


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def unigram_f1(said: str, wanted: str) -> float:
    """Return twice the shared words over all words; a word counts as often as both have it."""
    a, b = Counter(words(said)), Counter(words(wanted))
    return 2 * (a & b).total() / max((a + b).total(), 1)


def quality(
    said: Sequence[str], pairs: Sequence[Pair], plain: Sequence[str] | None
) -> dict[str, Any]:
    """Score answers; ``plain`` are the base's, to be held against."""
    wanted = [right for _, right in pairs]
    f1 = [unigram_f1(x, y) for x, y in zip(said, wanted, strict=True)]
    told: dict[str, Any] = {
        "exact": sum(words(x) == words(y) for x, y in zip(said, wanted, strict=True)),
        "unigram_f1": round(float(np.mean(f1)), 4),
        "f1_with_the_source": round(
            float(np.mean([unigram_f1(x, left) for x, (left, _) in zip(said, pairs, strict=True)])),
            4,
        ),
    }
    if plain is not None:
        gap = [a - unigram_f1(x, y) for a, x, y in zip(f1, plain, wanted, strict=True)]
        over = crossed_bootstrap([gap], seed=0)
        told["f1_over_base"] = [round(x, 4) for x in (over.value, over.low, over.high)]
    if sacrebleu is not None:
        told["bleu"] = round(sacrebleu.corpus_bleu(list(said), [wanted]).score, 2)
        told["chrf"] = round(sacrebleu.corpus_chrf(list(said), [wanted]).score, 2)
    return told


def generated(
    base: Base, test: Sequence[Pair], memories: dict[str, Compiled], args: argparse.Namespace
) -> dict[str, Any]:
    """Translate some test sentences with the first seed's memories, and keep what was said."""
    pairs = test[: args.generate]
    if not pairs:
        return {}
    said: dict[str, list[str]] = {}
    for kind in ("base", *KINDS):
        said[kind] = answers(base, [left for left, _ in pairs], memories.get(kind), args)
    path = args.folder / f"answers-{args.source.replace(':', '-').replace('/', '-')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"source": pair[0], "wanted": pair[1]} | {kind: said[kind][i] for kind in said}
        for i, pair in enumerate(pairs)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    told: dict[str, Any] = {
        kind: quality(x, pairs, None if kind == "base" else said["base"])
        for kind, x in said.items()
    }
    bleu = "not computed" if sacrebleu is None else f"sacrebleu {sacrebleu.__version__}"
    return {"sentences": len(pairs), "bleu_and_chrf": bleu, **told}


def study(base: Base, args: argparse.Namespace) -> dict[str, Any]:
    pairs = sentence_pairs(args.tasks, args.folder)
    pool, held_pairs, test_pairs = dealt(pairs, args.validation, args.test)
    held = Reading.of(base.model, taught(base, held_pairs, args))
    passages = taught(base, test_pairs, args)
    test, sizes = Reading.of(base.model, passages), [len(p.ids) - p.first for p in passages]
    found = {"base": [by_sentence(test, sizes, None)], "memory": [], "shuffled": []}
    chosen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    first: dict[str, Compiled] = {}
    for seed in range(args.seeds):
        support = drawn(pool, args.support, seed)
        for kind, told in zip(KINDS, (support, shuffled(support, seed)), strict=True):
            made = compiled(base, told, held, args)
            found[kind].append(by_sentence(test, sizes, made))
            chosen[kind].append(made.told)
            first.setdefault(kind, made)
            print(f"seed {seed}, {kind}: {json.dumps(made.told)}", flush=True)
    return {
        "pairs": {"all": len(pairs), "support": args.support, "validation": len(held_pairs)},
        "tokens": {"validation": len(held.targets_N), "test": sum(sizes)},
        "test_sentences": len(sizes),
        "chosen": chosen,
        "likelihood": likelihood(found, sizes),
        "laws": laws(base, passages[:3], first["memory"]),
        "greedy": generated(base, test_pairs, first, args),
    }


def table(told: dict[str, Any]) -> str:
    lines = [
        "| method | nats a token | perplexity | over the base's | 95 % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, row in told.items():
        ratio, low, high = row.get("ratio_over_base", (1.0, 1.0, 1.0))
        lines.append(
            f"| {kind} | {row['nats']:.3f} | {row['perplexity']:.2f} | {ratio:.4f} |"
            f" {low:.4f} to {high:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="embedded:smollm2-135m")
    parser.add_argument("--tasks", nargs=2, default=TASKS, help="from and to, of BIG-bench")
    parser.add_argument("--languages", nargs=2, default=(LANGUAGES[0], "French"))
    parser.add_argument("--folder", type=Path, default=Path("runs/translation"))
    parser.add_argument("--support", type=int, default=300)
    parser.add_argument("--validation", type=int, default=40)
    parser.add_argument("--test", type=int, default=60)
    parser.add_argument("--generate", type=int, default=24, help="test sentences to translate")
    parser.add_argument("--longest", type=int, default=72, help="tokens of an answer")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, made-up pairs")
    args = parser.parse_args()
    vars(args).update(QUICK if args.quick else {})
    args.languages = tuple(args.languages)
    torch.set_num_threads(1)
    began = time.process_time()
    told = {"source": args.source, "tasks": list(args.tasks), "languages": args.languages}
    told |= study(load_base(args.source), args)
    print(f"\n{table(told['likelihood'])}\n")
    told |= {"cpu_seconds": round(time.process_time() - began, 1), "machine": platform.machine()}
    told |= {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(told))


if __name__ == "__main__":
    main()

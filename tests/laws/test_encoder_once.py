# SPDX-License-Identifier: Apache-2.0
"""A transformer sees each item once in a run: counted at the module, not by our own counter."""

from __future__ import annotations

import json

import pytest
import torch

from fedloom.clients.faast import FAASTClient
from fedloom.clients.keys import key_bench
from fedloom.models.encoders import load_encoder
from fedloom.simulations import client_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process

WORDS = ["amber", "brook", "cedar", "dune", "ember", "fjord"]


@pytest.fixture
def config(digits, tmp_path):
    rows = [
        {"text": f"{WORDS[i % 6]} {WORDS[i % 5]} {i}", "label": ("good", "bad")[i % 2]}
        for i in range(90)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return digits(
        data__source=f"path:{path}", data__split="iid", clients__count=3,
        faast__encoder="lm:tiny:llama",
    )  # fmt: skip


@pytest.fixture
def seen():
    """Sequences that went through the network, batch by batch, and whether gradients were on."""
    batches: list[tuple[int, bool]] = []

    def hook(module, args, kwargs, output):
        (ids,) = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x)][:1]
        batches.append((len(ids), torch.is_grad_enabled()))

    encoder = load_encoder("lm:tiny:llama", "cpu")
    handle = encoder.model.register_forward_hook(hook, with_kwargs=True)
    yield batches
    handle.remove()


def test_a_whole_run_encodes_each_item_and_each_class_name_once(config, seen):
    run_in_process(config)
    bench = key_bench(config)
    assert bench.forwards == len(bench.items) == 90
    assert sum(count for count, _ in seen) == len(bench.items) + len(bench.classes)
    assert not any(graded for _, graded in seen)


def test_of_one_client_too(config, seen):
    bench = key_bench(config)
    seen.clear()  # of the classes' names
    client = FAASTClient(InProcessGrid(client_app.app, 3, config.flat())._contexts[1001])
    told = {"manifest": bench.manifest.digest(), "round": 1}
    client.evaluate([], {"frozen": True})
    client.fit([], told)
    weights = torch.zeros(4, bench.encoder.width, 2).numpy()
    _, _, scored = client.evaluate([weights], {**told, "validation": True, "memory-shares": [1.0]})
    client.evaluate([weights[0]], {**told, "memory-share": 1.0})
    held = [len(bench.rows(1, side)) for side in ("summed", "validation", "test")]
    assert sum(held) == 30
    assert sum(count for count, _ in seen) == 30
    assert scored["forwards"] == 0  # its own sums were scored on these rows

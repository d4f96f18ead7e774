# SPDX-License-Identifier: Apache-2.0
"""``fedloom faast train-readout``: the one thing in FAAST that is trained, once for each model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import Refusal
from fedloom.simulations.faast_cli import Dtype, Length, Model, Texts, loaded
from fedloom.simulations.needs import needs_node


def train_readout(
    out: Annotated[Path, typer.Option(help="File for the read-outs.")],
    text: Texts,
    memories: Annotated[
        int, typer.Option(min=1, help="Middle memories, evenly spaced over the blocks.")
    ] = 1,
    alpha: Annotated[
        float, typer.Option(min=0.0, help="Filter N^-alpha of the memories trained on.")
    ] = 1.0,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    max_steps: Annotated[int, typer.Option(min=0, help="0 is whole epochs.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    length: Length = 512,
    model: Model = "embedded:smollm2-135m",
    dtype: Dtype = "float32",
) -> None:
    """Train the read-outs of middle memories on text of no particular kind."""
    with needs_node("faast"):
        from fedloom.adapters.readout_files import ReadOutManifest, save_readouts
        from fedloom.config import TrainConfig
        from fedloom.language.compiling import read_texts
        from fedloom.language.readout import train_readouts
    if out.exists():
        raise Refusal(f"{out} is there already: name another file, or remove it")
    train = TrainConfig(
        epochs=epochs, max_steps=max_steps, batch_size=batch_size, learning_rate=learning_rate
    )
    texts = read_texts(text)
    base = loaded(model, dtype)
    readouts, report = train_readouts(
        base, texts, train, memories=memories, seed=seed, alpha=alpha, length=length
    )
    width = int(base.model.config.get_text_config().hidden_size)
    hashes = base.base_hash, base.tokenizer_hash
    manifest = ReadOutManifest(*hashes, width, tuple(readouts), alpha, report.steps)
    save_readouts(out, readouts, manifest)
    told = {
        "places": list(readouts),
        "parameters": sum(p.numel() for x in readouts.values() for p in x.parameters()),
        "steps": report.steps,
        "tokens": report.tokens,
        "loss_first": report.loss_first,
        "loss_last": report.loss_last,
        "seconds": round(report.seconds, 1),
    }
    typer.echo(json.dumps(told))

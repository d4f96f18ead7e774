"""A user's state never enters a message: looked for on the bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.common.serde import recorddict_to_proto

from fedloom import inference
from fedloom.clients.workbench import workbench

from runs import recorded

SECRET = "the patient in bed four is called Quillfeather"
PIECE = 16  # bytes: four float32 numbers, which do not come twice by chance


def pieces(tensor: torch.Tensor) -> set[bytes]:
    """Every run of so many bytes that starts at a number, where it says anything."""
    data = tensor.contiguous().numpy().tobytes()
    step = tensor.element_size()
    cut = {data[at : at + PIECE] for at in range(0, len(data) - PIECE + 1, step)}
    return {piece for piece in cut if len(set(piece)) > 4}  # zeros are anywhere


def test_a_state_on_a_node_never_enters_a_message(recipe, tmp_path):
    """Nodes hold a live session and its file while they train, score and answer queries."""
    config = recipe(memory__window=8, memory__sinks=2)
    bench = workbench(config)
    session = inference.Session(bench.adapter, chunk=8)
    pieces_of_text = inference.generate(session, bench.base.tokenizer, SECRET, max_new_tokens=8)
    assert list(pieces_of_text)
    owner = inference.owner_of(bench.base, bench.adapter)
    folder = Path(config.output) / config.name  # the likeliest place to be packed by mistake
    path = folder / "state.safetensors"
    inference.save_state(path, session, owner)

    grid = recorded(config)
    assert workbench(config) is bench  # the session's own process and adapter did the work
    wires = [
        recorddict_to_proto(message.content).SerializeToString()
        for message in (*grid.sent, *grid.answered)
    ]
    held = inference._tensors(session)
    wanted = set().union(*(pieces(x) for name, x in held.items() if name.count(".") == 2))
    assert len(wanted) > 1000
    for wire in wires:
        assert not wanted & {wire[at : at + PIECE] for at in range(len(wire) - PIECE + 1)}
        for name in (SECRET, "Quillfeather", path.name, "memory.000.S", owner.settings):
            assert name.encode() not in wire
    contexts = [recorddict_to_proto(c.state).SerializeToString() for c in grid._contexts.values()]
    assert not any(b"memory.000.S" in wire for wire in contexts)
    # and the same look does find what is sent: the arrays of the adapter
    trained = torch.from_numpy(next(iter(bench.adapter.arrays().values())))
    assert any(pieces(trained) & {w[at : at + PIECE] for at in range(len(w))} for w in wires)

from __future__ import annotations

import pytest
import torch

from fedloom.models.base import load_base
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.slice import CacheSlice


@pytest.fixture(scope="session")
def llama():
    return load_base("tiny:llama", "float64")


@pytest.fixture(scope="session")
def geometry(llama):
    return geometry_of(llama.model, llama.base_hash, llama.tokenizer_hash)


def made(layers: int, heads: int, dim: int, tokens: int, seed: int = 0) -> CacheSlice:
    """A slice of a model that need not exist."""
    random = torch.Generator().manual_seed(seed)
    shape = (heads, tokens, dim)
    draw = {n: torch.randn(2, *shape, generator=random) * 3 + 0.5 for n in range(layers)}
    by_layer = ((0,) * layers, (1e4,) * layers, (1.0,) * layers)
    geometry = Geometry("m" * 64, "t" * 64, "llama", layers, heads, dim, *by_layer, 1000)
    keys, values = ({n: x[i] for n, x in draw.items()} for i in (0, 1))
    return CacheSlice(geometry, keys, values, tuple(range(tokens)))


@pytest.fixture
def make_slice():
    return made

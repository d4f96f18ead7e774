from __future__ import annotations

import pytest
import torch

from fedloom.models import tiny

from grafts import FAMILIES


@pytest.fixture(params=FAMILIES)
def model(request):
    """A fresh float64 model: the laws below are then tight."""
    return tiny.build(request.param).double().eval().requires_grad_(False)


@pytest.fixture
def ids():
    return torch.randint(0, 256, (3, 45), generator=torch.Generator().manual_seed(0))

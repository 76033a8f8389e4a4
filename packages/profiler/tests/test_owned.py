"""What several layers share is counted once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import profile, profile_sizes

WEIGHT = 6 * 6 * 4
BIAS = 6 * 4


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_sums_are_those_of_the_model(owners):
    """Layer i has the weight of number ``owners[i]``, and a bias of its own."""
    weights = [nn.Parameter(torch.rand(6, 6)) for _ in range(4)]
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in owners))
    for layer, owner in zip(model, owners, strict=True):
        layer.weight = weights[owner]
    found = profile(model, torch.rand(2, 6), device="meta")
    assert sum(found.costs("parameter_bytes")) == sum(p.nbytes for p in model.parameters())
    first = [owner not in owners[:i] for i, owner in enumerate(owners)]
    assert found.costs("trainable_bytes") == [BIAS + WEIGHT * new for new in first]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_that_occurs_twice(device):
    layer = nn.BatchNorm1d(6)
    found = profile(nn.Sequential(layer, layer), torch.rand(4, 6), device=device, timeout=1e-6)
    assert found.costs("trainable_bytes") == [2 * BIAS, 0]
    assert found.costs("buffer_bytes") == [2 * BIAS + 8, 0]
    once, again = profile_sizes(nn.Sequential(layer, layer), torch.rand(4, 6), 1, 2.0, device)
    assert once - again == 2 * 2 * BIAS

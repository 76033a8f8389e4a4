import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import AllocationTracker, profile, profile_sizes


def test_counts_what_python_or_the_graph_keeps_alive():
    x = torch.rand(10, requires_grad=True)
    births = AllocationTracker()
    with births:
        kept_by_the_graph = x.exp().sum()  # exp keeps its result
        kept_by_python = torch.zeros(3)
        torch.ones(1000)
    assert births.alive() == 4 * (10 + 1 + 3)
    assert births.peak == 4 * (10 + 1 + 3 + 1000)
    kept_by_the_graph.backward()
    del kept_by_python
    assert births.alive() == 4


def test_views_in_place_results_and_inputs_allocate_nothing():
    x = torch.rand(4, 3)
    births = AllocationTracker()
    with births:
        outputs = x.t(), x[1:], x.add_(1), x.detach(), x.unflatten(1, (1, 3)), torch.relu_(x)
    assert len(outputs) == 6
    assert births.alive() == 0
    assert births.peak == 0


def test_a_reused_address_is_a_new_storage():
    births = AllocationTracker()
    with births:
        for _ in range(50):
            x = torch.empty(1000)
            del x
        y = torch.empty(1000)
    assert births.alive() == 4 * len(y)
    assert births.peak == 4 * len(y)


def test_storages_may_be_freed_on_another_thread(monkeypatch):
    """Like activations created by one stage of a pipeline and released by another, or by the caller."""

    def interrupted(storage):
        thread = threading.Thread(target=dying.clear)
        thread.start()
        thread.join(300)
        return nbytes(storage)

    births, nbytes = AllocationTracker(), torch.UntypedStorage.nbytes
    with births:
        kept, dying = torch.ones(3), [torch.ones(5) for _ in range(10)]
        monkeypatch.setattr(torch.UntypedStorage, "nbytes", interrupted)
        assert births.alive() >= 4 * len(kept)
        assert births.alive() == 4 * len(kept)
        more = torch.ones(1000)
    assert births.peak == 4 * (len(kept) + len(more))


WEIGHT = 6 * 6 * 4
BIAS = 6 * 4


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_sums_are_those_of_the_model(owners):
    """Layer i has weight ``owners[i]``, and its own bias."""
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

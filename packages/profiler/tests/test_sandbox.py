import weakref

import pytest
import torch
from hypothesis import given
from torch import nn

from microbatch import Batch
from profiler import _times, detach, layerwise_sandbox, profile_times
from profiler.sandbox import copied

from .hard_layers import SparseBuffer
from .strategies import models


@given(models())
def test_copies_train_on_the_device_and_share_nothing(model):
    model.eval()
    for layer, copy in zip(model, layerwise_sandbox(model, "cpu"), strict=True):
        assert all(child.training for child in copy.modules())
        assert not any(child.training for child in layer.modules())
        assert type(copy) is type(layer)
        for x, y in zip(layer.state_dict().values(), copy.state_dict().values(), strict=True):
            assert torch.equal(x, y)
            assert x.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("how", ["to_sparse", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"])
def test_sparse_buffers_are_copied(how):
    layer = SparseBuffer(how, *([(2, 2)] if "sparse_b" in how else []))
    copy = copied(layer)
    assert copy.mix is not layer.mix
    assert copy.mix.layout is layer.mix.layout
    assert torch.equal(copy.mix.to_dense(), layer.mix.to_dense())


@pytest.mark.parametrize("size", ["small", "large"])
def test_large_modules_are_copied_layer_by_layer(size, monkeypatch):
    alive, most, made = set(), [0], [0]

    class Counting(nn.Module):
        def __deepcopy__(self, memo):
            copied = Counting()
            weakref.finalize(copied, alive.discard, id(copied))
            alive.add(id(copied))
            most[0] = max(most[0], len(alive))
            made[0] += 1
            return copied

        def forward(self, x):
            return x * 2

    monkeypatch.setattr(_times, "_SMALL", {"small": 0, "large": -1}[size])
    model = nn.Sequential(*(Counting() for _ in range(3)))
    profile_times(model, torch.rand(2), 1e-9, "cpu")  # a round to warm up, and another
    assert (most, made) == {"small": ([3], [3]), "large": ([1], [6])}[size]


def test_detach_preserves_requires_grad():
    x = torch.rand(3, requires_grad=True)
    batch = Batch((x * 2, torch.rand(3), torch.arange(3)))
    before = [y.clone() for y in batch]
    detach(batch)
    assert [y.requires_grad for y in batch] == [True, False, False]
    assert all(y.is_leaf for y in batch)
    assert all(torch.equal(y, z) for y, z in zip(batch, before, strict=True))
    batch[0].sum().backward()
    assert x.grad is None

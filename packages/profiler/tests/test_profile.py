from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import profile
from profiler.memory import held_bytes, owned_bytes

from .strategies import WIDTH, fewer, models, samples


@fewer
@given(models(), samples(min_rows=8), st.integers(1, 4))
def test_the_figures_fit_together(model, sample, chunks):
    found = profile(model, sample, device="cpu", chunks=chunks, timeout=1e-6)
    assert (found.rows, found.rounds, found.device) == (-(-len(sample) // chunks), 3, "cpu")
    for layer, original in zip(found, model, strict=True):
        assert layer.kind == type(original).__name__
        assert layer.seconds == layer.forward_seconds + layer.backward_seconds > 0
        assert layer.parameter_bytes == sum(p.numel() * p.itemsize for p in original.parameters())
        assert layer.peak_bytes >= layer.saved_bytes


@fewer
@given(models(), samples(min_rows=8), st.integers(1, 4))
def test_without_a_device_there_is_everything_but_seconds(model, sample, chunks):
    real = profile(model, sample, device="cpu", chunks=chunks, timeout=1e-6)
    fake = profile(model, sample, device="meta", chunks=chunks)
    for ghost, layer in zip(fake, real, strict=True):
        # A real kernel may skip an unused gradient.
        assert ghost.peak_bytes >= layer.peak_bytes
        assert ghost == replace(layer, forward_seconds=None, backward_seconds=None, peak_bytes=ghost.peak_bytes)


def test_counted_by_hand():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4).requires_grad_(False), nn.Flatten())
    linear, norm, flatten = profile(model, torch.rand(10, WIDTH), device="cpu", timeout=1e-6, chunks=2)
    assert (linear.trainable_bytes, linear.frozen_bytes, linear.buffer_bytes) == (4 * (WIDTH * 4 + 4), 0, 0)
    assert (linear.saved_bytes, linear.output_bytes) == (4 * 5 * 4, 4 * 5 * 4)
    # A product for each weight and row, forward and for the weight's gradient; the input needs none.
    assert linear.flops == 2 * 2 * 5 * WIDTH * 4
    assert (norm.trainable_bytes, norm.frozen_bytes, norm.buffer_bytes) == (0, 4 * 8, 4 * 8 + 8)
    assert norm.saved_bytes == 4 * (5 * 4 + 2 * 4)  # the output, and mean and deviation of the batch
    assert (flatten.saved_bytes, flatten.output_bytes) == (0, 4 * 5 * 4)


def test_meta_module_defaults_to_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    assert profile(model, torch.rand(2, 3)).device == "meta"


def test_a_model_far_larger_than_memory_is_sized():
    width = 2**20
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    found = profile(model, torch.rand(1, 1).expand(2, width), device="meta")
    assert found.costs("trainable_bytes") == [4 * (width**2 + width)] * 3
    assert found.costs("saved_bytes") == [4 * 2 * width] * 3


class Chain(nn.ModuleList):
    """Like a pipe: runs its children in sequence, and iterates over them."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def test_any_iterable_of_layers_is_accepted():
    layers = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    found, expected = (
        profile(kind, torch.rand(4, 6), device="meta") for kind in (Chain(layers), nn.Sequential(*layers))
    )
    assert found == expected


@given(st.integers(1, 8), st.booleans())
def test_weight_stored_twice_counts_once(rows, is_taken):
    class Rows(nn.Parameter):
        pass

    class InRows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Rows(torch.ones(rows, 4, dtype=torch.int8), requires_grad=False)
            self.bias = nn.Parameter(torch.ones(rows))
            self.state = SimpleNamespace(weight=None, scales=None)
            holder = self.state if is_taken else self.weight
            holder.weight, holder.scales = self.weight.data, torch.ones(rows)

    (found,) = owned_bytes([InRows()])
    assert found["trainable_bytes"] == found["largest_parameter_bytes"] == 4 * rows
    assert found["frozen_bytes"] + found["buffer_bytes"] == 4 * rows + 4 * rows


@pytest.mark.filterwarnings("ignore:Sparse")
@given(
    st.sampled_from(["to_sparse", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"]),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_sparse_tensor_counts_indices_and_values(how, entries, dtype, requires_grad):
    blocks, dense = [(2, 2)] if "sparse_b" in how else [], torch.zeros(8, 64, dtype=dtype)
    dense[0, : 2 * entries : 2] = 1
    sparse = getattr(dense, how)(*blocks)
    saved = sparse.values() if how != "to_sparse" else sparse.coalesce().values()
    names = {"to_sparse": ["_indices"], "to_sparse_csr": ["crow_indices", "col_indices"]}
    names |= {"to_sparse_bsr": names["to_sparse_csr"], "to_sparse_csc": ["ccol_indices", "row_indices"]}
    names |= {"to_sparse_bsc": names["to_sparse_csc"]}
    expected = saved.nbytes + sum(getattr(sparse, name)().nbytes for name in names[how])
    layer = nn.Module()
    layer.register_buffer("table", sparse.requires_grad_(requires_grad))
    layer.register_buffer("same", sparse)
    assert held_bytes(layer.buffers()) == held_bytes([sparse, sparse]) == expected
    assert owned_bytes([layer])[0]["buffer_bytes"] == expected

"""FLOPs, compared with the matrix products that they consist of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import AllocationTracker, profile

from .hard_layers import first
from .strategies import Call, fewer

sizes = st.integers(1, 7)
DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


class Attends(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def product(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def flops(layer: nn.Module, x: torch.Tensor, device: str) -> float:
    (found,) = profile(nn.Sequential(layer), x.requires_grad_(), device=device, timeout=1e-6).costs("flops")
    return found


@DEVICES
@fewer
@given(sizes, sizes, sizes, sizes, st.integers(1, 2), st.booleans(), st.booleans())
def test_lstm_counts_products_with_inputs_and_states(device, rows, times, width, hidden, layers, both_ways, bias):
    inner = nn.LSTM(width, hidden, layers, bidirectional=both_ways, bias=bias, batch_first=True)
    ways, once = 1 + both_ways, 0
    for entering in [width, *(ways * hidden for _ in range(layers - 1))]:
        once += ways * (product(rows * times, entering, 4 * hidden) + product(rows * times, hidden, 4 * hidden))
    # The backward does as much for the inputs, and again for the matrices.
    assert flops(nn.Sequential(inner, Call(first)), torch.rand(rows, times, width), device) == 3 * once


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_no_recurrent_layer_is_free(kind):
    """Stepwise layers omit the gradient of the initial state, which is never used."""
    rows, times, width = 4, 6, 8
    layer = kind(width, width, num_layers=2, batch_first=True)
    most = 3 * product(rows * times, 1, sum(p.numel() for p in layer.parameters() if p.dim() == 2))
    assert 0.85 * most <= flops(nn.Sequential(layer, Call(first)), torch.rand(rows, times, width), "cpu") <= most


@DEVICES
@fewer
@given(sizes, sizes, st.integers(1, 3), sizes)
def test_attention_multiplies_queries_keys_and_values(device, rows, times, heads, width):
    layer = Attends(heads * width, heads, batch_first=True)
    projections = product(rows * times, heads * width, 4 * heads * width)
    scores = 2 * rows * heads * product(times, width, times)
    # Kernels that save no scores recompute them for the gradients of queries, keys and values.
    assert flops(layer, torch.rand(rows, times, heads * width), device) == 3 * projections + 3.5 * scores


@fewer
@given(sizes, sizes, sizes, sizes)
def test_groups_multiply_each_row_with_one_matrix(experts, rows, width, hidden):
    """A mixture of experts takes what a dense layer takes for as many rows, whatever the number of experts."""
    x = torch.rand(rows, 8 * width, dtype=torch.bfloat16, requires_grad=True)
    matrices = torch.rand(experts, 8 * width, 8 * hidden, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([rows * (k + 1) // experts for k in range(experts)], dtype=torch.int32)
    with AllocationTracker() as tracker:
        y = torch.nn.functional.grouped_mm(x, matrices, offs=ends)
        y.backward(torch.ones_like(y))
    assert tracker.flops == 3 * product(rows, 8 * width, 8 * hidden)
    assert not tracker.uncounted


@torch.library.custom_op("profiler_tests::fused", mutates_args=())
def fused(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T @ x


fused.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: torch.cdist(x, x), "aten._cdist_forward"),
        (lambda x: torch.fft.fft(x).real, "aten._fft_r2c"),
        (lambda x: fused(x), "profiler_tests.fused"),  # a function, which a copy of the layer has too
    ],
)
@DEVICES
def test_missing_formula_warning_names_operation_and_layer(compute, name, device):
    with pytest.warns(
        UserWarning, match=f"layer '1': there is no FLOP formula for {name}.*, so the FLOPs of the layer"
    ):
        profile(nn.Sequential(nn.ReLU(), Call(compute)), torch.rand(4, 4), device=device, timeout=1e-6)

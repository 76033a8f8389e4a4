"""On meta tensors, fused attention saves no scores, and shared memory stays shared."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from profiler import profile
from profiler.fake import blank_layer, fake_mode
from profiler.memory import owned_bytes

from .strategies import fewer


class Attention(nn.Module):
    def __init__(self, dropout: float, value_width: int | None = None, **options: object) -> None:
        super().__init__()
        self.dropout, self.value_width, self.options = dropout, value_width, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x[..., : self.value_width], dropout_p=self.dropout, **self.options)


def costs(layer: nn.Module, x: torch.Tensor) -> tuple[int, int, int]:
    (found,) = profile(nn.Sequential(layer), x, device="meta")
    return found.saved_bytes, found.peak_bytes, found.flops


@fewer
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 64), st.sampled_from([8, 16]), st.booleans())
def test_dropout_makes_no_difference(rows, heads, times, width, causal):
    x = torch.rand(rows, heads, times, width, requires_grad=True)
    with_dropout = costs(Attention(0.1, is_causal=causal), x)
    assert with_dropout == costs(Attention(0.0, is_causal=causal), x)
    saved = rows * heads * times * (width + 1) * 4  # what it gives, and a logarithm for each query
    assert with_dropout[0] == saved


class Decoder(nn.TransformerDecoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, Decoder])
def test_layers_of_pytorch_keep_no_scores(layer):
    times = 256
    x = torch.rand(1, times, 32, requires_grad=True)
    saved = [costs(layer(32, 4, 32, dropout=dropout, batch_first=True), x)[0] for dropout in (0.1, 0.0)]
    assert saved[0] - saved[1] < 4 * times * times * 4  # the size of the scores


class Rows(nn.Parameter):
    """Like the packed weights of quantization libraries."""


PLACES = {
    "parameter": lambda layer, name, x: layer.register_parameter(name, Rows(x, requires_grad=False)),
    "buffer": lambda layer, name, x: layer.register_buffer(name, x.detach()),
    "attribute": lambda layer, name, x: setattr(layer, name, x.detach()),
    "of the weight": lambda layer, name, x: setattr(layer.weight, name, x.detach()),
    "state": lambda layer, name, x: setattr(layer.state, name, x.detach()),
}


@fewer
@given(st.lists(st.tuples(st.sampled_from([*PLACES]), st.integers(0, 2)), min_size=1, max_size=8), st.booleans())
@example([("parameter", 0), ("state", 0)], True)
def test_blank_copy_preserves_shared_memory(held, is_faked):
    """Tensors with the same index share memory, like a weight that its layer stores twice."""
    layer = nn.Module()
    layer.state = SimpleNamespace()
    layer.weight = Rows(torch.ones(2, dtype=torch.int8), requires_grad=False)  # so that attributes count
    memory = [torch.ones(rows, 4, dtype=dtype) for rows, dtype in enumerate((torch.int8, torch.float32, torch.int8), 1)]
    for k, (place, which) in enumerate(held):
        PLACES[place](layer, f"n{k}", memory[which])
    with fake_mode() if is_faked else nullcontext() as mode:
        copied = blank_layer(layer, mode or nullcontext())
    assert [*map(total, owned_bytes([copied]))] == [*map(total, owned_bytes([layer]))]


def total(found: dict[str, int]) -> int:
    return sum(size for name, size in found.items() if name != "largest_parameter_bytes")

"""Attention without a device: a fused kernel keeps no scores."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import profile

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
    assert saved[0] - saved[1] < 4 * times * times * 4  # as much as the scores

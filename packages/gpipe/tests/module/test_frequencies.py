"""Layers that scale gradients by frequency train like the plain model, or raise an error naming them."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe

from ..layers import DOUBLE, assert_same, linears

KINDS = {"Embedding": nn.Embedding, "EmbeddingBag": nn.EmbeddingBag}


def model(kind: str, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(KINDS[kind](4, 3, dtype=DOUBLE, **options)), *linears(1))


@given(
    st.sampled_from(sorted(KINDS)),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_frequency_scaled_gradients_match_or_raise(
    kind: str, scales: bool, is_frozen: bool, chunks: int, words: list[int]
) -> None:
    plain = model(kind, scale_grad_by_freq=scales)
    plain[0].requires_grad_(not is_frozen)
    x = torch.tensor(words).view(4, 2)

    def made(chunks: int) -> GPipe:
        return GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=chunks)

    if scales and chunks > 1:
        with pytest.raises(ValueError, match=rf"chunks={chunks}: '0\.0' \({kind}\) has scale_grad_by_freq=True"):
            made(chunks)
        pipe = made(1)
        with pytest.raises(ValueError, match=r"'(0\.)?0\.0' \("):
            pipe.chunks = chunks
        assert pipe.chunks == 1
    else:
        pipe = made(chunks)
    pipe[0].requires_grad_()  # it may be trained later
    plain[0].requires_grad_()
    pipe(x).sum().backward()
    plain(x).sum().backward()
    assert_same(pipe, plain)
    pipe.close()

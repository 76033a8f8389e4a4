"""Blocks that process something other than rows, such as pictures, whose number varies per row."""

import copy
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from microbatch import Split

from .losses import assert_same_gradients

WIDTH, MOST = 4, 3


class Seeing(nn.Module):
    """Encodes the pictures of each text: all given ones, or the nonzero ones of a padded list."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double()

    def forward(self, texts: Tensor, numbers: Tensor, pictures: Tensor) -> dict[str, Tensor]:
        if pictures.dim() == 3:
            pictures = pictures.flatten(0, 1)
            pictures = pictures[pictures.any(1)]
        for layer in self.tower:
            pictures = layer(pictures)
        owner = torch.repeat_interleave(torch.arange(len(texts)), numbers, output_size=len(pictures))
        hidden = texts + torch.zeros_like(texts).index_add(0, owner, pictures)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": F.cross_entropy(hidden, numbers), "hidden": hidden, "seen": pictures}


numbers = st.lists(st.integers(0, MOST), min_size=2, max_size=7)


def batch(numbers: list[int], *, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(numbers))
    count = torch.tensor(numbers)
    there = torch.arange(MOST) < count[:, None]
    pictures = torch.randn(len(numbers), MOST, WIDTH, dtype=torch.double, generator=generator) * there[..., None]
    texts = torch.randn(len(numbers), WIDTH, dtype=torch.double, generator=generator)
    return {"texts": texts, "numbers": count, "pictures": pictures if padded else pictures[there]}


def new(chunks: int, *, padded: bool, **options: Any) -> tuple[GPipe, Seeing]:
    torch.manual_seed(0)
    plain = Seeing()
    counts = {} if padded else {"pictures": Split(counts=lambda batch: batch["numbers"])}
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=chunks, in_spec=counts or None, **options)
    return pipe, plain


@given(numbers, st.integers(1, 4), st.booleans())
def test_loss_through_blocks_of_pictures_matches(numbers: list[int], chunks: int, padded: bool) -> None:
    """The pictures per micro-batch are known, or selected by the model."""
    pipe, plain = new(chunks, padded=padded)
    inputs = batch(numbers, padded=padded)
    expected = plain(**inputs)["loss"]
    expected.backward()
    with closing(pipe):
        for found in (pipe.step(**inputs), pipe.evaluate(**inputs)):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        assert_same_gradients(pipe, plain)


@given(numbers, st.integers(1, 4), st.booleans())
def test_output_in_order_is_joined(numbers: list[int], chunks: int, padded: bool) -> None:
    pipe, plain = new(chunks, padded=padded)
    inputs = batch(numbers, padded=padded)
    with closing(pipe):
        for name, expected in plain(**inputs).items():
            torch.testing.assert_close(pipe(**inputs)[name], expected, rtol=1e-12, atol=1e-12)


class Backwards(Seeing):
    """Reverses its pictures, so that the order differs between the full batch and micro-batches."""

    def forward(self, texts: Tensor, numbers: Tensor, pictures: Tensor) -> dict[str, Tensor]:
        return super().forward(texts, numbers, pictures[pictures.any(2)].flip(0))


def test_picked_output_in_different_order_raises() -> None:
    inputs, plain = batch([1, 2, 1, 2, 1, 2], padded=True), Backwards()
    for pick in (None, "seen"):
        pipe = GPipe(plain, devices=["cpu"] * 3, chunks=3, pick=pick)
        with closing(pipe), pytest.raises(RuntimeError, match="in another order"):
            pipe(**inputs)
    with closing(GPipe(plain, devices=["cpu"] * 3, chunks=1)) as pipe:
        torch.testing.assert_close(pipe(**inputs)["seen"], plain(**inputs)["seen"])


class Routing(Seeing):
    """Sorts rows by score for each expert, so that the order differs between the full batch and micro-batches."""

    def forward(self, texts: Tensor) -> Tensor:
        found = torch.zeros_like(texts)
        for column, expert in zip(texts.T, self.tower, strict=False):
            order = column.argsort(descending=True)
            order = order[: int((column > 0).sum())]
            found = found.index_add(0, order, expert(texts[order]))
        for layer in self.layers:
            found = layer(found)
        return found


@given(st.integers(2, 9), st.integers(2, 4))
def test_reordered_rows_of_experts_may_feed_blocks(rows: int, chunks: int) -> None:
    texts = torch.randn(rows, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(rows))
    torch.manual_seed(0)
    plain = Routing()
    with closing(GPipe(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=chunks)) as pipe:
        loss = pipe.step(texts, loss_fn=lambda output: output.square().sum().sqrt())
    plain(texts).square().sum().sqrt().backward()
    torch.testing.assert_close(loss, plain(texts).detach().square().sum().sqrt())
    assert_same_gradients(pipe, plain)

"""Blocks that get the rows of the full mini-batch in a different order than micro-batches raise."""

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe import GPipe
from gpipe.model._row_order import are_in_order, compute_numbers

from ..layers import MODES, assert_same, rows
from .residuals import Residuals, plain_of, residuals
from .test_forward import done

Change = Callable[[Tensor], Tensor]


@given(st.permutations(range(6)), st.integers(0, 1), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_reordering_is_distinguished_from_other_values(order: list[int], dim: int, dtype: torch.dtype) -> None:
    whole = torch.randn(6, 5, 40, generator=torch.Generator().manual_seed(1)).to(dtype).movedim(0, dim)
    numbers, parts = compute_numbers(whole, dim), whole.index_select(dim, torch.tensor(order)).chunk(3, dim)
    found = are_in_order([compute_numbers(part, dim) for part in parts], numbers, dtype)
    assert found == (order == sorted(order))
    others = [compute_numbers(part + 0.1 * torch.randn_like(part), dim) for part in parts]
    assert are_in_order(others, numbers, dtype) is None


@given(
    st.floats(1e-3, 1e3),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_entries_that_are_alike_are_in_any_order(
    value: float, rows: int, columns: int, chunks: int, dtype: torch.dtype
) -> None:
    whole = torch.full((rows, columns), value, dtype=dtype)
    assert are_in_order([compute_numbers(part, 0) for part in whole.chunk(chunks)], compute_numbers(whole, 0), dtype)


class Ordered(Residuals):
    """Changes the order of rows, or their number, before a block, and back after all."""

    at: int
    there: Change
    back: Change

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for k, layer in enumerate(self.layers):
            y = self.there(y) if k == self.at else y
            y = y + layer(y).tanh()
        return self.head(self.back(y))


REFUSED = {
    "reversed": (lambda y: y.flip(0), lambda y: y.flip(0)),
    "two inputs": (lambda y: torch.cat([y, y * 2]), lambda y: torch.mul(*y.chunk(2))),
    "time first, flat": (lambda y: torch.stack([y, y + 1]).flatten(0, 1), lambda y: y.unflatten(0, (2, -1)).prod(0)),
    "two inputs of no values": (lambda y: torch.cat([y, y * 0]), lambda y: torch.mul(*y.chunk(2))),
}
RIGHT = {
    "flat": (lambda y: torch.stack([y, y + 1], 1).flatten(0, 1), lambda y: y.unflatten(0, (-1, 2)).prod(1)),
    "repeated": (lambda y: y.repeat_interleave(2, 0), lambda y: y[::2]),
    "time first": (lambda y: torch.stack([y, y + 1]), lambda y: y.prod(0)),
    "normalized": (lambda y: (y - y.mean(0)) / (1 + y.std(0, correction=0)), lambda y: y),
}


def made(at: int, there: Change, back: Change) -> Ordered:
    model = Ordered(*residuals().layers)
    model.at, model.there, model.back = at, there, back
    return model


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_where_outputs_are_joined(changes: tuple[Change, Change], at: int, mode: str) -> None:
    model, x = made(at, *changes), rows(6)
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=3, checkpoint=mode)) as pipe:
        for how in ("call", "whole", "call"):
            with pytest.raises(RuntimeError, match=rf"Ordered calls block 'layers\.{at}' with the rows .* in another"):
                done(pipe, x, how)
        plain = plain_of(pipe)
        model.zero_grad()
        done(pipe, x, "1f1b")
    for part in x.chunk(3):
        plain(part).square().sum().backward()
    assert_same(model, plain)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("how", ["call", "whole"])
@pytest.mark.parametrize("name", RIGHT)
def test_rows_in_same_order_match_model(name: str, how: str, at: int, chunks: int) -> None:
    model, x = made(at, *RIGHT[name]), rows(6)
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=chunks)) as pipe:
        plain = plain_of(pipe)
        for _ in range(2):
            model.zero_grad()
            done(pipe, x, how)
    if name == "normalized" and chunks > 1:  # by the micro-batch in blocks
        return
    plain(x).square().sum().backward()
    assert_same(model, plain)

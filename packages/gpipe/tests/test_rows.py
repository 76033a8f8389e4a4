"""A target has the rows of its input, or is refused with both numbers; what is handed whole needs none."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import inline
from microbatch import Replicate, Split

from .layers import Call, assert_same, linears, piped, rows

pytestmark = pytest.mark.timeout(60)


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 5), st.sampled_from(["1f1b", "fill_drain"]), st.booleans())
@example(4, 3, 2, "1f1b", False)
@example(6, 5, 3, "1f1b", True)
def test_any_numbers_of_rows_are_those_of_the_plain_model_or_refused(
    count: int, others: int, chunks: int, schedule: str, inlined: bool
) -> None:
    model, x, y = linears(), rows(count), rows(others)
    pipe = piped(model, [1, 2], chunks=chunks)
    with inline() if inlined else nullcontext():
        if count != others:
            with pytest.raises(ValueError, match=rf"target has {others} rows .*, the input {count} rows "):
                pipe.step(x, y, loss_fn=F.mse_loss, schedule=schedule)
            assert all(parameter.grad is None for parameter in pipe.parameters())
            return
        loss = pipe.step(x, y, loss_fn=F.mse_loss, schedule=schedule)
    expected = F.mse_loss(model(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same(pipe, model)


def first(values: tuple[Tensor, ...]) -> Tensor:
    return values[0]


@pytest.mark.parametrize(("count", "allowed"), [(2, True), (4, True), (6, True), (3, False), (8, False)])
def test_tensors_of_one_input_may_differ_and_a_target_is_like_one_of_them(count: int, allowed: bool) -> None:
    pipe = piped(nn.Sequential(Call(first), *linears()), [2, 2], chunks=2)
    seen: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        return output.sum()

    inputs = (rows(4), rows(2), rows(6))
    if allowed:
        pipe.step(inputs, rows(count), loss_fn=loss)
        assert seen == [count // 2] * 2
    else:
        with pytest.raises(ValueError, match=rf"target has {count} rows .*, the input 4 and 2 and 6 rows "):
            pipe.step(inputs, rows(count), loss_fn=loss)


def test_each_part_of_a_target_counts() -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    with pytest.raises(ValueError, match="target has 6 and 5 rows"):
        pipe.step(rows(6), {"a": rows(6), "b": [None, rows(5)]}, loss_fn=lambda output, target: output.sum())


def test_the_way_out_works() -> None:
    model, weight = linears(), torch.rand(3, dtype=torch.float64)
    pipe = piped(model, [1, 2], chunks=2)

    def loss(output: Tensor, target: tuple[Tensor, ...]) -> Tensor:
        return ((output - target[0].T).square() * target[1]).mean()

    value = pipe.step(rows(6), (Split(rows(6).T, dim=1), Replicate(weight)), loss_fn=loss)
    torch.testing.assert_close(value, loss(model(rows(6)), (rows(6).T, weight)).detach())


class Flagged(nn.Module):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        return -x if flag else x


def test_an_argument_that_is_no_tensor_goes_to_each_micro_batch() -> None:
    pipe = piped(nn.Sequential(Flagged(), *linears()), [2, 2], chunks=2)
    for flag in (True, Replicate(True)):
        torch.testing.assert_close(pipe(rows(), flag=flag), linears()(-rows()))

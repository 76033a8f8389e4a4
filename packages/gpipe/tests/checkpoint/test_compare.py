"""A recomputation that gives something else than its forward is told by its outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, is_recomputing
from gpipe.checkpoint._compare import Extent, Sample
from microbatch import Batch

from ..layers import Call, rows

EXTENTS = tuple(Extent)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (100 * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)


@given(
    shape=st.lists(st.integers(1, 12), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    extent=st.sampled_from((Extent.SOME, Extent.ALL)),
)
def test_other_values_are_refused(shape: tuple[int, ...], dtype: torch.dtype, extent: Extent) -> None:
    value = some(shape, dtype)
    other = ~value if dtype is torch.bool else value * 2 + 1
    with pytest.raises(RuntimeError, match="tensor 1 of 2 has other values"):
        Sample(Batch((value, value)), extent).expect(Batch((value, other)))


@given(at=st.integers(0, 199))
def test_a_whole_comparison_sees_every_element(at: int) -> None:
    value = some((10, 20), torch.float64)
    other = value.clone()
    other.view(-1)[at] += 1
    with pytest.raises(RuntimeError, match="other values by up to 1"):
        Sample(Batch(value), Extent.ALL).expect(Batch(other))


@given(dtype=st.sampled_from(DTYPES[:5]), extent=st.sampled_from(EXTENTS))
def test_rounding_is_no_difference(dtype: torch.dtype, extent: Extent) -> None:
    value = some((10, 20), dtype)
    Sample(Batch(value), extent).expect(Batch(value + value * (4 * torch.finfo(dtype).eps)))


@given(extent=st.sampled_from(EXTENTS))
def test_nan_is_like_nan_and_infinity_like_itself(extent: Extent) -> None:
    value = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    Sample(Batch(value), extent).expect(Batch(value.clone()))


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, requires_grad=True)]
)
def test_other_kinds_are_refused(other: Tensor, extent: Extent) -> None:
    with pytest.raises(RuntimeError, match="another output than its forward"):
        Sample(Batch(torch.zeros(2, 2)), extent).expect(Batch(other))


def sneaky(size: int, when: int) -> nn.Module:
    """A layer that changes one element of its output in the recomputation of one run, by something in a closure."""
    runs = {"now": 0}

    def act(x: Tensor) -> Tensor:
        output = x.repeat(1, size)
        runs["now"] += not is_recomputing()
        return output.index_fill(1, torch.tensor([1]), 0.0) if is_recomputing() and runs["now"] > when else output * 1

    return Call(act)


def trained(layer: nn.Module, runs: int, **options: Any) -> None:
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=1, checkpoint="always", **options)
    for _ in range(runs):
        pipe(rows(grad=True)).sum().backward()


def test_the_first_micro_batch_is_compared_as_a_whole() -> None:
    with pytest.raises(RuntimeError, match="another output"):
        trained(sneaky(1000, when=0), runs=1)


def test_everything_is_under_gpipe_check(monkeypatch: pytest.MonkeyPatch) -> None:
    trained(sneaky(1000, when=1), runs=2)
    monkeypatch.setenv("GPIPE_CHECK", "1")
    with pytest.raises(RuntimeError, match="another output"):
        trained(sneaky(1000, when=1), runs=2)


def test_after_train_and_eval_of_a_layer_the_first_is_compared_again() -> None:
    layer = nn.Sequential(sneaky(1000, when=1), nn.Identity())
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=1, checkpoint="always")
    pipe(rows(grad=True)).sum().backward()
    layer[1].eval()
    with pytest.raises(RuntimeError, match="another output"):
        pipe(rows(grad=True)).sum().backward()


def test_gpipe_check_must_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_CHECK", "yes")
    with pytest.raises(ValueError, match="GPIPE_CHECK must be 0 or 1; got 'yes'"):
        trained(nn.Identity(), runs=1)

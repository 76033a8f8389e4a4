"""A recomputation that differs from its forward is detected by its outputs."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, is_recomputing
from gpipe.checkpoint._compare import Sample

from ..layers import Call, rows

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def some(dtype: torch.dtype) -> Tensor:
    return (100 * torch.rand(10, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)


@given(at=st.integers(0, 199), dtype=st.sampled_from((*FLOATS, torch.int64, torch.bool)))
@example(7, torch.float64)
def test_every_other_value_is_refused(at: int, dtype: torch.dtype) -> None:
    value = some(dtype)
    other = value.clone()
    other.view(-1)[at] = not value.view(-1)[at] if dtype is torch.bool else 1000
    with pytest.raises(RuntimeError, match="tensor 1 of 2 has other values"):
        Sample((value, value), whole=True).expect((value, other))


@given(elements=st.integers(1, 500), dtype=st.sampled_from((*FLOATS, torch.int64)))
def test_sample_detects_change_of_all_elements(elements: int, dtype: torch.dtype) -> None:
    value = torch.ones(elements, dtype=dtype)
    with pytest.raises(RuntimeError, match="tensor 0 of 1 has other values"):
        Sample((value,), whole=False).expect((value * 2,))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16])
def test_types_that_torch_cannot_compare_are_not_compared(dtype: torch.dtype) -> None:
    for whole in (False, True):
        Sample((some(dtype),), whole=whole).expect((some(dtype),))


@given(dtype=st.sampled_from(FLOATS))
def test_rounding_nan_and_infinity_are_equal(dtype: torch.dtype) -> None:
    value = some(dtype)
    other = value + value * (4 * torch.finfo(dtype).eps)
    value[0, :3] = other[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    Sample((value,), whole=True).expect((other,))


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, requires_grad=True)]
)
def test_other_kinds_are_refused(other: Tensor) -> None:
    with pytest.raises(RuntimeError, match="another output than its forward"):
        Sample((torch.zeros(2, 2),), whole=False).expect((other,))


@pytest.mark.parametrize(
    ("when", "elements", "check", "refused"),
    [(0, 1, "0", True), (1, 1, "0", False), (1, 1, "1", True), (1, 1000, "0", True)],
)
def test_first_recomputation_is_compared_completely(
    when: int, elements: int, check: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer changes elements of its output in recomputations after some runs, by something in a closure."""
    runs = 0

    def sneaky(x: Tensor) -> Tensor:
        nonlocal runs
        runs += not is_recomputing()
        output = x.repeat(1, 1000)
        others = torch.arange(1, 1 + elements)
        return output.index_fill(1, others, 0.0) if is_recomputing() and runs > when else output * 1

    monkeypatch.setenv("GPIPE_CHECK", check)
    pipe = GPipe(nn.Sequential(Call(sneaky)), [1], devices=["cpu"], chunks=1, checkpoint="always")
    with pytest.raises(RuntimeError, match="another output") if refused else nullcontext():
        for _ in range(2):
            pipe(rows(grad=True)).sum().backward()


def test_gpipe_check_must_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_CHECK", "yes")
    with pytest.raises(ValueError, match="GPIPE_CHECK must be 0 or 1; got 'yes'"):
        GPipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"], checkpoint="always")(rows(grad=True))

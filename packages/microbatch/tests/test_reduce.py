"""One value of all micro-batches out of one of each."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from microbatch import Batch, Mean, Sum, gather, scatter

rows_and_chunks = st.tuples(st.integers(0, 9), st.integers(1, 5))


def rows(count: int) -> Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda x: x.square().mean(), Mean()),
        (lambda x: x.square().mean(0), Mean()),
        (lambda x: x.square().mean(0, keepdim=True)[:, :1], Mean()),
        (lambda x: x.square().sum(), Sum()),
        (lambda x: x.T @ x, Sum()),
        (lambda x: (x > 0).sum(), Sum()),
    ],
)
@given(rows_and_chunks)
def test_reduction_matches_full_batch(function: Any, rule: Any, size: tuple[int, int]) -> None:
    x, y = rows(size[0]), rows(size[0])
    found = gather([batch.call(function) for batch in scatter(x, size[1])], rule)
    expected = function(y)
    torch.testing.assert_close(found, expected, equal_nan=True)
    if expected.requires_grad:
        weight = torch.arange(1.0, expected.numel() + 1, dtype=torch.float64).view(expected.shape)
        (found * weight).sum().backward()
        (expected * weight).sum().backward()
        torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


@pytest.mark.parametrize("rule", [Mean(), Sum()])
def test_what_is_no_number_is_not_reduced(rule: Any) -> None:
    with pytest.raises(TypeError, match=r"^output\[1\] is of type str, which cannot be split"):
        gather([Batch((2.0, "text"), (1,))] * 2, rule)


@pytest.mark.parametrize("rule", [Mean(), Sum()])
@pytest.mark.parametrize(
    ("first", "other", "kind"),
    [
        (torch.ones(()), torch.ones(1), ValueError),
        (torch.ones(2), torch.ones(1), ValueError),
        (torch.ones(2), torch.ones(2).double(), ValueError),
        (torch.ones(2), torch.ones(2, device="meta"), ValueError),
        (torch.ones(2), 3.0, TypeError),
        (3.0, None, TypeError),
        (3, "text", TypeError),
    ],
)
def test_unlike_parts(rule: Any, first: Any, other: Any, kind: Any) -> None:
    with pytest.raises(kind, match=r"^output\['loss'\] is .* in micro-batch 1"):
        gather([Batch({"loss": first}, (1,)), Batch({"loss": other}, (1,))], {"loss": rule})


def test_integers_have_no_mean() -> None:
    with pytest.raises(TypeError, match=r"^output is of dtype torch.int64, which has no Mean\(\)"):
        gather([Batch(torch.tensor(1), (1,))] * 2, Mean())


def test_a_mean_needs_rows() -> None:
    with pytest.raises(
        ValueError, match=r"^output has the rule Mean\(\), which needs rows, but micro-batch 1 has none"
    ):
        gather([Batch(torch.tensor(1.0), (1,)), Batch(torch.tensor(1.0))], Mean())

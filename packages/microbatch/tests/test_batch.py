"""A value with its tensors, in tree order."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from torch import Tensor

from microbatch import Batch

from .same import assert_same
from .strategies import Problem, problems

x, y, z = torch.tensor(42), torch.tensor(21), torch.tensor(7)


def identical(mine: Any, theirs: Any) -> bool:
    return all(a is b for a, b in zip(mine, theirs, strict=True))


def test_a_tensor_is_atomic() -> None:
    batch = Batch(x)
    assert batch.atomic
    assert batch.value is batch.tensor is batch.tensor_or_tensors is batch[0] is batch[-1] is x
    assert len(batch) == 1
    assert identical(batch, [x])


@given(problems())
@example(Problem(42, 1, None))
@example(Problem((), 1, None))
def test_batch_iterates_over_tensors_in_tree_order(problem: Problem) -> None:
    batch, tensors = Batch(problem.value), [leaf for leaf in problem.leaves if isinstance(leaf, Tensor)]
    assert not batch.atomic
    assert batch.value is problem.value
    assert isinstance(batch.tensors, tuple)
    assert identical(batch.tensors, tensors)
    assert identical(batch.tensor_or_tensors, tensors)
    assert identical(batch, tensors)
    assert len(batch) == len(tensors)
    assert identical([batch[i] for i in range(len(batch))], tensors)


def test_the_wrong_one_of_tensor_and_tensors() -> None:
    with pytest.raises(AttributeError, match=r"one bare tensor has no \.tensors; use \.tensor"):
        _ = Batch(x).tensors
    with pytest.raises(AttributeError, match=r"of type tuple has no \.tensor; use \.tensors"):
        _ = Batch((x,)).tensor


@given(problems())
def test_replacing_all_by_all_is_a_noop(problem: Problem) -> None:
    batch = Batch(problem.value)
    batch[:] = iter(list(batch))  # type: ignore[assignment]
    assert identical(batch, Batch(problem.value))
    assert_same(batch.value, problem.value)


@pytest.mark.parametrize("value", [x, [x], {"a": x}, (x, None)])
def test_nothing_else_may(value: Any) -> None:
    with pytest.raises(IndexError, match="holds 1 tensors, got 2 to replace them"):
        Batch(value)[:] = (y, z)
    with pytest.raises(IndexError, match="holds 1 tensors, got 0 to replace them"):
        Batch(value)[:] = ()


@pytest.mark.parametrize("value", [x, (x, y), {"a": x}])
def test_a_tensor_is_not_taken_for_its_rows(value: Any) -> None:
    batch = Batch(value)
    with pytest.raises(TypeError, match=r"batch\[:\] is set to a tensor; expected a sequence .* batch\[:\] = \(t,\)"):
        batch[:] = torch.ones(len(batch), 2)
    assert batch.value is value


@pytest.mark.parametrize("value", [x, (x,), {"a": x}])
@pytest.mark.parametrize("index", [1, -2])
def test_an_index_out_of_range(value: Any, index: int) -> None:
    batch = Batch(value)
    with pytest.raises(IndexError, match=rf"batch\[{index}\] is out of range; this batch holds 1 tensors"):
        _ = batch[index]
    with pytest.raises(IndexError, match="out of range"):
        batch[index] = y
    assert identical(batch, [x])

"""How many rows each micro-batch gets."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from microbatch import Split, gather, scatter, scatter_views

from .same import assert_same

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(sizes, st.booleans())
def test_explicit_sizes_are_those_of_the_micro_batches(chunks: list[int], grad: bool) -> None:
    value = {"x": torch.ones(sum(chunks), 2, requires_grad=grad), "y": (torch.arange(sum(chunks)),)}
    found = scatter(value, chunks if grad else tuple(chunks))
    assert [len(batch.value["y"][0]) for batch in found] == chunks
    assert_same(gather(found), value)
    assert_same(gather(scatter_views(value, chunks)[0]), value)


def test_sizes_that_are_not_those_of_the_rows() -> None:
    message = r"^chunks=\[3, 4\] deals 7 rows, but input\['x'\] with shape \(2, 8\) has 8 along dimension 1"
    with pytest.raises(ValueError, match=message):
        scatter({"x": Split(torch.ones(2, 8), dim=1)}, [3, 4])


@pytest.mark.parametrize("chunks", [[], [2.0], ["2"], "22", [None], {}, None, 2.0, "2", iter([2]), torch.ones(2)])
def test_sizes_of_another_type(chunks: Any) -> None:
    with pytest.raises(TypeError, match="expected an integer of at least 1, or a list of the rows of each"):
        scatter(torch.ones(2), chunks)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (0, "chunks is 0; expected at least 1"),
        (-1, "chunks is -1; expected"),
        ([3, -1], r"chunks is \[3, -1\]; no micro-"),
    ],
)
def test_fewer_than_none(chunks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scatter(torch.ones(2), chunks)

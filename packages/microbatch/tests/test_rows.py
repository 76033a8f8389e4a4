"""`gather` knows the rows of each micro-batch, and rejects outputs that do not match them."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from microbatch import Batch, Split, gather, scatter, scatter_views

from .strategies import Problem, problems

many = st.lists(st.integers(0, 4), min_size=2, max_size=4)


def batches(rows: list[int], make: Any) -> list[Batch]:
    return [Batch(make(n), (n,)) for n in rows]


@given(problems())
def test_scatter_counts_the_rows_of_what_it_cuts(problem: Problem) -> None:
    for cut in (scatter(*problem), scatter_views(*problem)[0]):
        anchors = [batch.value[0].shape[0] for batch in cut]
        assert [batch.rows[0] for batch in cut] == anchors
        assert len({len(batch.rows) for batch in cut}) == 1


@given(many, st.integers(0, 3))
def test_so_many_times_the_rows_pass(rows: list[int], times: int) -> None:
    result = gather(batches(rows, lambda n: torch.arange(float(times * n))))
    assert len(result) == times * sum(rows)


@given(many, many)
@example([2, 2, 1], [1, 1, 1])
@example([0, 0], [1, 1])
@example([2, 1], [1, 2])
def test_what_is_not_a_multiple_is_refused(rows: list[int], sizes: list[int]) -> None:
    rows, sizes = rows[: len(sizes)], sizes[: len(rows)]
    parts = [Batch({"x": torch.ones(n), "h": torch.ones(size)}, (n,)) for n, size in zip(rows, sizes, strict=True)]
    if any(sizes == [times * n for n in rows] for times in range(5)):
        assert len(gather(parts)["h"]) == sum(sizes)
    else:
        with pytest.raises(
            ValueError, match=r"^output\['h'\] does not have one row per sample: the micro-batches have \["
        ):
            gather(parts)
    assert len(gather(parts, {"x": None, "h": Split(0)})["h"]) == sum(sizes)


@pytest.mark.parametrize("rows", [[2, 2], [3, 1]])
@pytest.mark.parametrize(
    ("make", "dim"),
    [
        (lambda n: torch.ones(8, n), 1),
        (lambda n: torch.ones(12, n, 5), 1),
        (lambda n: torch.ones(4, 5, n), 2),
        (lambda n: torch.ones(1, n, 5), 1),
    ],
)
def test_rows_on_another_dimension_are_found_there(rows: list[int], make: Any, dim: int) -> None:
    with pytest.raises(ValueError, match=rf"^output has its rows on dimension {dim}, not 0: .*; use Split\({dim}\)"):
        gather(batches(rows, make))
    assert gather(batches(rows, make), Split(dim)).shape[dim] == 4


def test_any_of_several_numbers_of_rows_will_do() -> None:
    parts = scatter((torch.ones(3), torch.ones(4)), 2)  # rows 2, 1 and 2, 2
    assert [batch.rows for batch in parts] == [(2, 2), (1, 2)]

    def gathered(*sizes: int) -> Tensor:
        return gather([Batch(torch.ones(size), batch.rows) for size, batch in zip(sizes, parts, strict=True)])

    assert [len(gathered(*sizes)) for sizes in [(2, 1), (2, 2), (4, 2), (6, 6)]] == [3, 4, 6, 12]
    with pytest.raises(ValueError, match=r"the micro-batches have \[2, 1\] or \[2, 2\], its shapes are \(1,\), \(3,\)"):
        gathered(1, 3)


def test_gather_skips_row_check_if_rows_unknown() -> None:
    assert gather([Batch(torch.ones(3), (2,))]).shape == (3,)
    assert gather([Batch(torch.ones(3)), Batch(torch.ones(1))]).shape == (4,)
    assert gather([Batch(torch.ones(3), (2,)), Batch(torch.ones(1))]).shape == (4,)

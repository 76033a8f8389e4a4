"""Outputs of a block for micro-batches are joined in the dimension of the rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.model._rows import NOWHERE, UNKNOWN, Argument, dim_between, dim_by, join_rows

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@given(shape=SHAPES, data=st.data(), rows=st.lists(st.integers(1, 4), min_size=2, max_size=4), factor=st.integers(1, 3))
def test_parts_are_joined_where_arguments_have_rows(
    shape: list[int], data: st.DataObject, rows: list[int], factor: int
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.randn([*shape[:dim], factor * sum(rows), *shape[dim + 1 :]])
    parts = whole.split([factor * count for count in rows], dim)
    size = parts[0].shape
    found = join_rows(parts, [rows], [Argument(size, dim_between(size, whole.shape))])
    assert found is not None
    assert torch.equal(found, whole)


@given(shape=SHAPES, data=st.data(), rows=st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_uneven_rows_determine_the_dimension(shape: list[int], data: st.DataObject, rows: list[int]) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.randn([*shape[:dim], sum(rows), *shape[dim + 1 :]])
    found = join_rows(whole.split(rows, dim), [rows], [])
    if len({*rows}) > 1:
        assert found is not None
        assert torch.equal(found, whole)
    else:  # without arguments there is nothing that has rows
        assert found is not None
        assert torch.equal(found, whole.split(rows, dim)[0])


def test_argument_of_equal_size_has_priority() -> None:
    size = torch.Size([12, 2, 8])
    mask, positions = Argument(torch.Size([12, 12, 2]), 2), Argument(torch.Size([24, 8]), NOWHERE)
    assert dim_by([mask, positions], size) == UNKNOWN
    assert dim_by([Argument(size, 1), mask, positions], size) == 1
    assert dim_by([mask, Argument(torch.Size([12, 2]), 1)], size) == UNKNOWN


def test_outputs_in_unknown_order_are_not_joined() -> None:
    parts = torch.randn(7, 2).split([3, 4])  # like an expert, which gets some of the tokens
    assert join_rows(parts, [[2, 2]], [Argument(torch.Size([3, 2]), 0)]) is None
    assert join_rows([torch.randn(()), torch.randn(())], [[2, 2]], [Argument(torch.Size([2, 3]), 0)]) is None


def test_multiples_of_rows_are_joined_like_arguments() -> None:
    rows, hidden = [2, 2], Argument(torch.Size([2, 5, 8]), 0)
    tokens = [torch.randn(10, 3), torch.randn(10, 3)]
    found = join_rows(tokens, [rows], [hidden])
    assert found is not None
    assert torch.equal(found, torch.cat(tokens))
    assert join_rows([torch.randn(4), torch.randn(4)], [rows], [hidden]) is None  # one value per expert

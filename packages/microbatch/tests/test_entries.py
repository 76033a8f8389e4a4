"""Lists with one entry per row, of any type and size."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from microbatch import Arguments, Entries, Replicate, gather, rules, scatter, scatter_views, unwrap


@dataclass
class Boxes:
    corners: Any
    name: Any


sizes = st.lists(st.integers(0, 4), min_size=1, max_size=7)
KINDS = [
    lambda count: {"boxes": torch.ones(count, 4), "id": count},
    lambda count: Boxes(torch.ones(count, 2), None),
    lambda count: torch.ones(count),
    lambda count: (torch.ones(count), "name"),
    str,
]


def listed(counts: list[int], kind: int) -> list[Any]:
    return [KINDS[kind](count) for count in counts]


def of_all(batches: list[Any], name: str) -> list[Any]:
    return [entry for batch in batches for entry in batch.value[name]]


@given(sizes, st.integers(0, 4), st.integers(1, 8), st.booleans(), st.booleans())
def test_entries_follow_their_rows(counts: list[int], kind: int, chunks: int, is_around: bool, views: bool) -> None:
    entries, numbers = listed(counts, kind), torch.arange(len(counts))
    value = {"rows": numbers, "labels": Entries(entries) if is_around else entries, "numbers": [*range(len(counts))]}
    spec = {"numbers": Entries(), **({} if is_around else {"labels": Entries()})}
    batches = scatter_views(value, chunks, spec)[0] if views else scatter(value, chunks, spec)
    assert of_all(batches, "numbers") == numbers.tolist()
    for batch in batches:
        assert batch.value["rows"].tolist() == batch.value["numbers"]
        torch.testing.assert_close(
            [repr(each) for each in batch.value["labels"]] and batch.rows, (len(batch.value["labels"]),)
        )
    found = of_all(batches, "labels")
    assert list(map(repr, found)) == list(map(repr, entries))
    assert len(entries) == len(counts)


@given(sizes, st.integers(1, 8))
def test_a_list_alone_is_cut_too(counts: list[int], chunks: int) -> None:
    batches = scatter(Arguments((), {"labels": listed(counts, 0)}), chunks, Arguments((), {"labels": Entries()}))
    assert [entry["id"] for batch in batches for entry in batch.value.kwargs["labels"]] == counts


def test_several_lists_may_be_beside_each_other() -> None:
    value = [torch.arange(2), Entries([1, 2]), Entries([[3], [4]])]
    assert [batch.value[1:] for batch in scatter(value, 2)] == [[[1], [[3]]], [[2], [[4]]]]


def test_entries_need_one_item_per_row() -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match="a list of 3 entries but 4 rows"):
        scatter((x, Entries([1, 2, 3])), 4)
    with pytest.raises(TypeError, match=r"input\[1\] is of type int, but Entries\(\) needs a list"):
        scatter((x, Entries(3)), 4)
    with pytest.raises(ValueError, match=r"input\[1\] is given as Entries\(\), but there is nothing in it"):
        scatter((x, Entries([{}, {}])), 4)
    with pytest.raises(ValueError, match="give it one rule"):
        scatter((x, Entries([x])), 4, (None, Replicate()))
    with pytest.raises(TypeError, match=r"the spec of the output has Entries\(\)"):
        gather(scatter((x, Replicate([1])), 4), (None, Entries()))


def test_the_rule_is_that_of_each_leaf() -> None:
    bare, spec = unwrap({"labels": Entries([{"id": 1}, {"id": 2}])})
    assert bare == {"labels": [{"id": 1}, {"id": 2}]}
    assert rules(bare, spec) == [Entries(), Entries()]
    assert repr(Entries([1])) == "Entries([1])"

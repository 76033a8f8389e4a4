from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given

from microbatch._paths import LeafPath, children, leaf_paths

from .strategies import Output, Pair, Problem, problems


class Sparse(dict):  # type: ignore[type-arg]
    """A mapping that keeps what is None out of the tree, and names nothing."""


def _flatten(mapping: Sparse) -> tuple[list[Any], Any]:
    kept = {key: value for key, value in mapping.items() if value is not None}
    return list(kept.values()), list(kept)


pytree.register_pytree_node(Sparse, _flatten, lambda values, keys: Sparse(zip(keys, values, strict=True)))


@given(problems())
def test_each_leaf_has_a_path_that_leads_to_it(problem: Problem) -> None:
    paths = list(leaf_paths(problem.value, "value"))
    assert len(set(paths)) == len(paths)
    for path, leaf in zip(paths, problem.leaves, strict=True):
        assert eval(path, {"value": problem.value}) is leaf


@given(problems())
def test_the_text_of_a_place_is_its_path(problem: Problem) -> None:
    texts = [str(LeafPath(problem.value, i, "value")) for i in range(len(problem.leaves))]
    assert texts == list(leaf_paths(problem.value, "value"))


def test_a_leaf_has_no_children_and_an_empty_tree_has_none_of_them() -> None:
    assert children(torch.ones(2)) is None
    assert children(None) is None
    assert children(()) == []


@pytest.mark.parametrize(
    ("tree", "labels"),
    [
        ((1, (2, 3)), ["[0]", "[1]"]),
        ({"a": 1, 3: 2}, ["['a']", "[3]"]),
        (Pair(1, 2), [".left", ".right"]),
        (Output(x=1, y=2), ["['x']", "['y']"]),
        (Sparse(x=None, y=2), ["[0]"]),  # no telling which key it was
    ],
)
def test_labels(tree: Any, labels: list[str]) -> None:
    assert [label for label, _ in children(tree) or ()] == labels

"""What goes together although it does not look it, and what does not."""

from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from microbatch import Batch, Replicate, gather

x = torch.ones(2)
KINDS: list[Any] = [dict, OrderedDict, UserDict, lambda items: defaultdict(list, items)]


@pytest.mark.parametrize("kind", KINDS)
@given(st.permutations("abc"), st.permutations("abc"))
def test_the_order_of_keys_does_not_matter(kind: Any, first: list[str], other: list[str]) -> None:
    def value(order: list[str], at: int) -> Any:
        return [kind({key: kind({key: torch.full((2,), at + ord(key))}) for key in order}), x]

    result = gather([Batch(value(first, 0)), Batch(value(other, 10))])
    assert list(result[0]) == first
    for key in "abc":
        assert result[0][key][key].tolist() == [ord(key)] * 2 + [10 + ord(key)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_other_keys_do(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^micro-batch 1 is unlike micro-batch 0: output\[0\] is a .*\['b'\] instead"):
        gather([Batch((kind({"a": x}),)), Batch((kind({"b": x}),))])


class Scaled:
    def __init__(self, x: Any, scale: int) -> None:
        self.x, self.scale = x, scale


pytree.register_pytree_node(Scaled, lambda s: ([s.x], s.scale), lambda leaves, scale: Scaled(*leaves, scale))


def test_constants_of_registered_types_must_agree() -> None:
    assert gather([Batch(Scaled(x, 2)), Batch(Scaled(x, 2))]).x.shape == (4,)
    with pytest.raises(ValueError, match="output is a Scaled with other constants"):
        gather([Batch(Scaled(x, 2)), Batch(Scaled(x, 3))])


NAN = float("nan")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([NAN, 1.0]),
        lambda: torch.tensor(complex(NAN, 1)),
        lambda: torch.tensor([NAN], dtype=torch.float16),
        lambda: float("nan"),
        lambda: complex("nan"),
        lambda: np.array([NAN, 1.0]),
        lambda: np.float32("nan"),
        lambda: np.array([1, 2]),
        lambda: "text",
        lambda: torch.arange(3),
        lambda: torch.tensor([True]),
    ],
)
def test_equal_values_agree_not_a_number_among_them(make: Any) -> None:
    gather([Batch((x, make())), Batch((x, make()))], (None, Replicate()))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0])),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN])),
        (torch.tensor([NAN]), torch.tensor([NAN, NAN])),
        (NAN, 1.0),
        (np.array([NAN, 1.0]), np.array([NAN, 2.0])),
        (np.array([1, 2]), np.array([1, 2, 3])),
    ],
)
def test_others_do_not(first: Any, other: Any) -> None:
    with pytest.raises(ValueError, match=r"output\[1\] is not the same in micro-batch 1"):
        gather([Batch((x, first)), Batch((x, other))], (None, Replicate()))

"""Values other than tensors and constants may contain tensors, and raise between stages and at the output."""

import enum
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packages.microbatch.tests.strategies import UNREGISTERED, Pair, Sample
from torch import Tensor, nn

from gpipe import GPipe, inline
from microbatch import flatten

from .layers import MODES, Call, assert_trains_like, linears, piped, rows


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Rows(list):
    """Subclasses of containers are not pytree nodes."""


class Colour(enum.Enum):
    RED = 1


OPAQUE: dict[str, Callable[[Any], Any]] = {
    "slots": Slotted,
    "list": lambda x: Rows([x]),
    "set": lambda x: {x},
    "closure": lambda x: lambda: x,
    "generator": lambda x: (each for each in [x]),
    "module": lambda x: Call(lambda _: x),
    "array": lambda x: np.array([x.detach()], dtype=object),
}

CONSTANTS = st.sampled_from(
    [
        *(None, True, 3, 2.5, 1j, "words", b"bytes", Fraction(1, 3), np.float32(2), np.int64(1), Colour.RED, ...),
        *(slice(1, None), range(3), int, torch.float32, torch.device("cpu"), torch.strided, torch.channels_last),
        torch.Size([2, 3]),
    ]
)


CONTAINERS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: (b, a),
    lambda a, b: [a, b],
    lambda a, b: {"b": a, "a": b},
    lambda a, b: OrderedDict(k=b, v=a),
    *(Pair, Sample, *UNREGISTERED),
]


def packings(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Callable[[Any], Any]]:
    """Return functions that put a value into containers with constants; the value is the only other leaf."""

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        parts = st.tuples(st.sampled_from(CONTAINERS), inner, leaf)
        return parts.map(lambda p: lambda x: p[0](p[1](x), p[2]))

    return st.recursive(st.just(lambda x: x), deeper, max_leaves=4)


def only_tensor(value: Any) -> Any:
    (found,) = (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))
    return found


@given(packings(CONSTANTS), st.sampled_from(MODES))
def test_constants_beside_tensors_travel(pack: Callable[[Any], Any], mode: str):
    model = nn.Sequential(*linears(1), Call(pack), Call(only_tensor), *linears(1))
    with inline():
        assert_trains_like(piped(model, [2, 1, 1], chunks=2, checkpoint=mode), model)


@given(packings(CONSTANTS), st.sampled_from(sorted(OPAQUE)), st.booleans(), st.booleans())
def test_opaque_objects_are_refused_wherever_they_stand(pack: Callable[[Any], Any], name: str, last: bool, later: bool):
    turns = iter([later, False])
    layers = [*linears(1), Call(lambda x: x if next(turns) else pack(OPAQUE[name](x)))]
    layers += [] if last else [Call(lambda value: rows().requires_grad_())]
    balance = [1, 1] if last else [2, 1]
    pipe = GPipe(nn.Sequential(*layers), balance, devices=["cpu", "cpu"], chunks=2)
    with (
        inline(),
        pytest.raises(TypeError, match=rf"output.* of partition {len(balance) - 2 + last} .*may hold tensors"),
    ):
        pipe.step(rows(), loss_fn=lambda value, _: only_tensor(value).sum())

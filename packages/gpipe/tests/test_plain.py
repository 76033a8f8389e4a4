"""What is neither a tensor nor a constant may hide tensors, and is refused between stages and at the end."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

from gpipe import GPipe, inline
from microbatch import flatten

from .layers import MODES, Call, assert_same, assert_trains_like, linears, piped, rows


@dataclass
class Bare:
    x: Any


@dataclass
class Registered:
    x: Any


_pytree.register_dataclass(Registered)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Rows(list):
    """Subclasses of containers are no trees."""


class Lookup(dict):
    pass


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.Enum):
    RED = 1


# Dataclasses and mappings are trees, registered or not.
PLAIN: dict[str, Callable[[Any], Any]] = {
    "dataclass": Bare,
    "dict": lambda x: Lookup(x=x),
    "user dict": lambda x: UserDict(x=x),
}

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


def packings(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Callable[[Any], Any]]:
    """Ways to put a value into containers, beside constants; the value is the only leaf that is not one."""
    here = st.just(lambda x: x)

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.tuples(inner, leaf).map(lambda p: lambda x: (p[1], p[0](x))),
            st.tuples(inner, leaf).map(lambda p: lambda x: [p[0](x), p[1]]),
            st.tuples(inner, leaf).map(lambda p: lambda x: {"b": p[0](x), "a": p[1]}),
            st.tuples(inner, leaf).map(lambda p: lambda x: OrderedDict(k=p[1], v=p[0](x))),
            st.tuples(inner, leaf).map(lambda p: lambda x: Pair(p[0](x), p[1])),
            st.tuples(inner, leaf).map(lambda p: lambda x: Registered((p[1], p[0](x)))),
            st.tuples(inner, leaf).map(lambda p: lambda x: Bare((p[1], p[0](x)))),
            st.tuples(inner, leaf).map(lambda p: lambda x: Lookup(b=p[0](x), a=p[1])),
            st.tuples(inner, leaf).map(lambda p: lambda x: UserDict(b=p[0](x), a=p[1])),
        )

    return st.recursive(here, deeper, max_leaves=4)


def only_tensor(value: Any) -> Any:
    (found,) = (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))
    return found


@given(packings(CONSTANTS), st.sampled_from(MODES))
def test_constants_beside_tensors_travel(pack: Callable[[Any], Any], mode: str):
    model = nn.Sequential(*linears(1), Call(pack), Call(only_tensor), *linears(1))
    with inline():
        assert_trains_like(piped(model, [2, 1, 1], chunks=2, checkpoint=mode), model)


@given(packings(CONSTANTS), st.sampled_from(sorted(OPAQUE)), st.booleans())
def test_opaque_objects_are_refused_wherever_they_stand(pack: Callable[[Any], Any], name: str, last: bool):
    layers = [*linears(1), Call(lambda x: pack(OPAQUE[name](x)))]
    layers += [] if last else [Call(lambda value: rows())]
    balance = [1, 1] if last else [2, 1]
    pipe = GPipe(nn.Sequential(*layers), balance, devices=["cpu", "cpu"], chunks=2)
    with (
        inline(),
        pytest.raises(TypeError, match=rf"output.* of partition {len(balance) - 2 + last} .*may hold tensors"),
    ):
        pipe.step(rows(), loss_fn=lambda value, _: only_tensor(value).sum())


def held(value: Any) -> Any:
    """What is in a dataclass or mapping."""
    return value.x if isinstance(value, Bare) else value["x"]


@pytest.mark.parametrize("threads", [inline, nullcontext], ids=["inline", "threads"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_dataclasses_and_mappings_travel(name: str, mode: str, threads: Any):
    pack = PLAIN[name]
    first, last = linears(2)
    layers = [Call(held), first, Call(lambda x: pack((x, {"y": x * 2}))), Call(lambda v: held(v)[0] * held(v)[1]["y"])]
    model = nn.Sequential(*layers, last, Call(pack))
    pipe = piped(model, [1, 2, 1, 1, 1], chunks=3, checkpoint=mode)
    x, y = rows(grad=True), rows(grad=True)
    with threads():
        output, expected = pipe(pack(x)), model(pack(y))
        assert type(output) is type(expected)
        torch.testing.assert_close(held(output), held(expected))
        held(output).square().sum().backward()
        held(expected).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        assert_same(pipe, model)

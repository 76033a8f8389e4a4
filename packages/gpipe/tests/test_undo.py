"""Modules and generators are as they were before a step that failed."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe.checkpoint._snapshot import Slot
from gpipe.checkpoint._state import SMALL
from gpipe.engine._undo import Undo

CPU = torch.device("cpu")


class Keeps(nn.Module):
    """Something of each kind."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(size))
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.ones(2))
        self.calls = 0
        self.seen: Tensor | None = None
        self.generator = torch.Generator().manual_seed(3)

    def change(self) -> None:
        self.buffer.add_(1)
        self.absent = torch.ones(1)
        self.calls += 1
        self.seen = torch.ones(1)
        self.late = 5
        torch.rand(2, generator=self.generator)
        torch.rand(2)


def seen(module: Keeps) -> dict[str, Any]:
    own = {"buffer": module.buffer.clone(), "absent": module.absent, "calls": module.calls, "seen": module.seen}
    states = {"own": module.generator.get_state(), "process": torch.get_rng_state()}
    return {**own, **states, "late": getattr(module, "late", None)}


@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_all_is_as_before(size: int):
    module = Keeps(size)
    buffer, before = module.buffer, seen(module)
    undo = Undo([module], [CPU], set())
    module.change()
    assert undo.put_back() == []
    torch.testing.assert_close(seen(module), before, rtol=0, atol=0)
    assert module.buffer is buffer
    assert not hasattr(module, "late")


class Holds(nn.Module):
    """What is put there."""


@dataclass
class Record:
    """An object of a class of the user's own."""

    first: Any


@dataclass
class Slots:
    """Another, whose attributes are in no dict."""

    __slots__ = ("first", "second")

    first: Any


class Row(NamedTuple):
    first: Any


class Rows(list):  # type: ignore[type-arg]
    """A list with a name."""


class Cyclic(Record):
    """Has itself among its attributes."""

    def __init__(self, first: Any) -> None:
        super().__init__(first)
        self.own = self


OBJECTS = (Record, Slots, Cyclic, SimpleNamespace, Holds)
LEAVES = {
    "generator": lambda: torch.Generator().manual_seed(0),
    "tensor": lambda: torch.zeros(2),
    "array": lambda: np.zeros(2),
    "read-only": lambda: np.broadcast_to(np.zeros(1), 2),
    "random": lambda: random.Random(0),
    "rng": lambda: np.random.default_rng(0),
    "old rng": lambda: np.random.RandomState(0),
    "function": lambda: lambda: 1,
}

contents = st.recursive(
    st.integers(0, 3) | st.sampled_from([*LEAVES]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(Rows)
        | st.lists(inner, max_size=3).map(deque)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 2), inner, max_size=3)
        | st.dictionaries(st.integers(0, 2), inner, max_size=3).map(Counter)
        | st.frozensets(st.integers(0, 3)).map(set)
        | inner.map(Row)
        | st.tuples(st.sampled_from(OBJECTS), inner)
    ),
    max_leaves=6,
)


def made(value: Any) -> Any:
    """``value`` with a generator, an object and so on of its own where their names are."""
    if isinstance(value, dict):
        return type(value)({key: made(each) for key, each in value.items()})
    if isinstance(value, Row):
        return Row(made(value.first))
    if isinstance(value, tuple) and value[:1] and value[0] in OBJECTS:
        return with_first(value[0], made(value[1]))
    if isinstance(value, (list, tuple, deque)):
        return type(value)(map(made, value))
    return LEAVES.get(str(value), lambda: value)()


def with_first(kind: Any, first: Any) -> Any:
    if kind in (Record, Slots, Cyclic):
        return kind(first)
    holds = kind()
    holds.first = first
    return holds


def shuffle(value: Any) -> None:
    """Change all that is in ``value``, and what that holds."""
    if isinstance(value, torch.Generator):
        torch.rand(1, generator=value)
    elif isinstance(value, (random.Random, np.random.Generator)):
        value.random()
    elif isinstance(value, np.random.RandomState):
        value.rand()
    elif isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.flags.writeable):
        value += 1
    elif isinstance(value, (list, tuple, dict, deque)):
        for each in [*(value.values() if isinstance(value, dict) else value)]:
            shuffle(each)
    if isinstance(value, (list, deque)):
        value.append(7)
    elif isinstance(value, dict):
        value.pop(0, None)
        value[9] = []
    elif isinstance(value, set):
        value ^= {1, 9}
    elif isinstance(value, OBJECTS):
        shuffle(value.first)
        value.first = value.second = [8]


def shown(value: Any) -> Any:
    """What can be seen of ``value``, also which objects it is made of."""
    if isinstance(value, (torch.Generator, Tensor)):
        return id(value), (value.get_state() if isinstance(value, torch.Generator) else value).tolist()
    if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
        return id(value), str(state_of(value))
    if isinstance(value, np.ndarray):
        return id(value), value.tolist()
    if isinstance(value, dict):
        return id(value), [(key, shown(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return id(value), [*map(shown, value)]
    if isinstance(value, OBJECTS):
        return id(value), shown(value.first), hasattr(value, "second")
    return sorted(value) if isinstance(value, set) else value


def state_of(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()


@given(contents, st.booleans())
def test_what_is_in_containers_is_as_before(value: Any, replaces: bool):
    module = Holds()
    module.kept = made(value)
    before = shown(module.kept)
    undo = Undo([module], [CPU], set())
    shuffle(module.kept)
    module.late = [1]
    if replaces:
        module.kept = object()
    assert undo.put_back() == []
    assert shown(module.kept) == before
    assert not hasattr(module, "late")


@pytest.mark.parametrize("kind", [lambda value: [value], Record])
def test_a_large_tensor_in_a_list_or_object_is_named(kind: Any):
    module, large = Holds(), torch.zeros(SMALL + 1)
    module.kept = kind(large)
    undo = Undo([module], [CPU], set())
    large.add_(1)
    assert [slot.name for slot in undo.put_back()] == ["kept"]


def test_what_is_not_the_layers_own_is_let_alone():
    """Classes, functions, modules of Python, and what libraries keep in their objects."""
    module, lock = Holds(), threading.Lock()
    module.kept = [Record, np, lock, threading.Event(), random, Holds.forward, weakref.ref(module)]
    undo = Undo([module], [CPU], set())
    Record.late = 1
    module.kept[3].set()
    assert undo.put_back() == []
    assert Record.__dict__["late"] == 1
    assert module.kept[3].is_set()
    del Record.late


def test_a_long_chain_of_objects():
    module = Holds()
    module.kept = last = Record(None)
    for _ in range(5000):
        last.first = last = Record(None)
    undo = Undo([module], [CPU], set())
    last.first = 1
    assert undo.put_back() == []
    assert last.first is None


def test_also_a_change_that_leaves_no_trace():
    module = Keeps()
    undo = Undo([module], [CPU], set())
    module.buffer.data.numpy()[:] = 7
    assert undo.put_back() == []
    assert module.buffer.tolist() == [0, 0, 0]


def test_a_large_tensor_that_stays_is_copied_once():
    module, still = Keeps(SMALL + 1), set[Slot]()
    Undo([module], [CPU], still).settle()
    assert {slot.name for slot in still} == {"buffer"}
    undo = Undo([module], [CPU], still)
    assert {slot.name for slot in undo._copies} == set()
    module.buffer.add_(1)
    assert [slot.name for slot in undo.put_back()] == ["buffer"]
    assert not still  # from now on it is copied again


def test_a_large_tensor_that_moves_is_copied_every_time():
    module, still = Keeps(SMALL + 1), set[Slot]()
    undo = Undo([module], [CPU], still)
    module.change()
    undo.settle()
    assert not still


def test_a_parameter_is_not_put_back():
    module = Keeps()
    undo = Undo([module], [CPU], set())
    with torch.no_grad():
        module.weight.mul_(2)
    assert [slot.name for slot in undo.put_back()] == ["weight"]

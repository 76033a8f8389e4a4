"""Modules and generators are as they were before a step that failed."""

from __future__ import annotations

from collections import deque
from typing import Any

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


contents = st.recursive(
    st.integers(0, 3) | st.sampled_from(["generator", "tensor"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(deque)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 2), inner, max_size=3)
        | st.frozensets(st.integers(0, 3)).map(set)
    ),
    max_leaves=6,
)


def made(value: Any) -> Any:
    """``value`` with a generator and a tensor of its own where their names are."""
    if isinstance(value, dict):
        return {key: made(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value)(map(made, value))
    return {"generator": torch.Generator().manual_seed(0), "tensor": torch.zeros(2)}.get(str(value), value)


def shuffle(value: Any) -> None:
    """Change all that is in ``value``, and what that holds."""
    if isinstance(value, torch.Generator):
        torch.rand(1, generator=value)
    elif isinstance(value, Tensor):
        value.add_(1)
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


def shown(value: Any) -> Any:
    """What can be seen of ``value``, also which objects it is made of."""
    if isinstance(value, (torch.Generator, Tensor)):
        return id(value), (value.get_state() if isinstance(value, torch.Generator) else value).tolist()
    if isinstance(value, dict):
        return id(value), [(key, shown(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return id(value), [*map(shown, value)]
    return sorted(value) if isinstance(value, set) else value


@given(contents, st.booleans())
def test_what_is_in_containers_is_as_before(value: Any, replaces: bool):
    module = Holds()
    module.kept = made(value)
    before = shown(module.kept)
    undo = Undo([module], [CPU], set())
    shuffle(module.kept)
    module.late = [1]
    if replaces and isinstance(value, (list, dict)):
        module.kept = []
    assert undo.put_back() == []
    assert shown(module.kept) == before
    assert not hasattr(module, "late")


def test_a_large_tensor_in_a_list_is_named():
    module = Holds()
    module.kept = [torch.zeros(SMALL + 1)]
    undo = Undo([module], [CPU], set())
    module.kept[0].add_(1)
    assert [slot.name for slot in undo.put_back()] == ["kept"]


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

"""Modules and generators are as they were before a step that failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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

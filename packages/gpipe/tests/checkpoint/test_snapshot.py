"""Two looks at modules differ by exactly what was changed between them, and it can be put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe.checkpoint._snapshot import ABSENT, Slot, View


class Counts(nn.Module):
    """Has one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("later", None)
        self.calls = 0
        self.last: Any = None
        self.history: list[int] = []


@torch.no_grad()
def add_one(tensor: torch.Tensor) -> None:
    tensor.add_(1)


CHANGES: dict[tuple[str, str, str], Callable[[Counts], object]] = {
    ("a parameter in place", "_parameters", "weight"): lambda m: add_one(m.weight),
    ("another parameter", "_parameters", "weight"): lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2))),
    ("a buffer in place", "_buffers", "mean"): lambda m: add_one(m.mean),
    ("another buffer", "_buffers", "mean"): lambda m: setattr(m, "mean", torch.ones(2)),
    ("no buffer any more", "_buffers", "mean"): lambda m: setattr(m, "mean", None),
    ("a buffer that was None", "_buffers", "later"): lambda m: setattr(m, "later", torch.ones(2)),
    ("a number", "attribute", "calls"): lambda m: setattr(m, "calls", m.calls + 1000),
    ("an attribute that was None", "attribute", "last"): lambda m: setattr(m, "last", torch.ones(2)),
    ("a new attribute", "attribute", "fresh"): lambda m: setattr(m, "fresh", 1),
    ("no attribute any more", "attribute", "calls"): lambda m: delattr(m, "calls"),
}
UNSEEN: list[Callable[[Counts], object]] = [lambda m: m.history.append(1), lambda m: m.eval(), lambda m: m.weight + 1]


@given(st.lists(st.sampled_from(list(CHANGES)), max_size=4, unique_by=lambda change: change[1:]), st.booleans())
def test_what_moved_is_what_was_changed(changes: list[tuple[str, str, str]], other: bool) -> None:
    modules = [Counts(), Counts()]
    view = View(modules, ())
    before = view.look()
    assert before.moved(view.look()) == []
    for change in changes:
        CHANGES[change](modules[other])
    for change in UNSEEN:
        change(modules[other])
    after = view.look()
    assert set(before.moved(after)) == {Slot(modules[other], kind, name) for _, kind, name in changes}
    assert len(before.moved(after)) == len(changes)


@given(st.lists(st.sampled_from(list(CHANGES)), max_size=4, unique_by=lambda change: change[1:]))
def test_what_was_there_can_be_put_back(changes: list[tuple[str, str, str]]) -> None:
    module = Counts()
    view = View([module], ())
    before = view.look()
    changes = [change for change in changes if "in place" not in change[0]]
    for change in changes:
        CHANGES[change](module)
    for slot in before.moved(view.look()):
        slot.value = before.value(slot)
    assert before.moved(view.look()) == []
    assert module.calls == 0
    assert not hasattr(module, "fresh")


def test_of_ignored_modules_only_parameters_are_looked_at() -> None:
    module = Counts()
    view = View([module], [module])
    before = view.look()
    for change in CHANGES.values():
        change(module)
    assert {slot.kind for slot in before.moved(view.look())} == {"_parameters"}


def test_a_slot_where_nothing_is() -> None:
    module = Counts()
    slot = Slot(module, "attribute", "nowhere")
    assert slot.value is ABSENT
    assert View([module], ()).look().value(slot) is ABSENT
    slot.value = 3
    assert module.nowhere == 3
    slot.value = ABSENT
    assert not hasattr(module, "nowhere")

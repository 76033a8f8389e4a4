"""What layers keep together, beside what is alive after they ran."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe.simulate import stage_costs
from gpipe.timeline._kept import freed, kept_bytes, shares
from profiler import AllocationTracker, LayerProfile, profile

from ..plans import layer as made_up

sizes = st.integers(0, 20)


@st.composite
def layers(draw: st.DrawFn) -> list[LayerProfile]:
    count = draw(st.integers(1, 6))
    return [
        LayerProfile(str(k), "Linear", 1.0, 1.0, 0, 0, 0, draw(sizes), draw(sizes), 0, 0,
                     passing_bytes=draw(sizes), freed_bytes=draw(sizes))
        for k in range(count)
    ]  # fmt: skip


@given(layers(), st.data())
def test_a_stage_keeps_at_least_the_shares_of_its_layers(found: list[LayerProfile], data: st.DataObject):
    each = shares(found)
    assert min(each) >= 0
    assert sum(each) == kept_bytes(found)
    first = data.draw(st.integers(0, len(found) - 1))
    end = data.draw(st.integers(first + 1, len(found)))
    stage = found[first:end]
    assert sum(each[first:end]) <= kept_bytes(stage) <= sum(layer.saved_bytes for layer in stage)
    assert freed(found)[0] == 0


def test_where_nothing_passes_shares_are_what_was_saved():
    found = [made_up(str(k), 1.0, 3, 5, 7, 2) for k in range(4)]
    assert shares(found) == [layer.saved_bytes for layer in found]


@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 3, 2]], ids=str)
def test_stages_are_predicted_to_keep_what_is_alive_after_their_forwards(balance: list[int]):
    model = nn.Sequential(*[make() for _ in range(3) for make in (lambda: nn.Linear(8, 8), nn.ReLU)])
    x = torch.rand(4, 8, requires_grad=True)
    found = stage_costs(profile(model, x, device="cpu", timeout=1e-6), balance)
    first = 0
    for size, cost in zip(balance, found, strict=True):
        entered = x.detach().requires_grad_() * 1
        with AllocationTracker() as tracker:
            output = model[first : first + size](entered)
        del entered  # a later layer may hold it, which did not make it
        assert cost.activation_bytes == tracker.alive()
        first += size
    del output

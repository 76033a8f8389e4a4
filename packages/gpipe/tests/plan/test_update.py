"""Plans that learn from a recorded step: what it says is believed, and the balance follows it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe
from gpipe import Plan, Timeline, inline, plan
from gpipe.simulate import StageCost

from ..layers import linears, rows
from .test_plan import loss, made, model

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def planned(schedule: str, checkpoint: str) -> Plan:
    return made(chunks=8, schedule=schedule, checkpoint=checkpoint)


def slower(stage: StageCost, factor: float) -> StageCost:
    parts = {
        name: factor * seconds
        for name in ("forward", "backward", "recompute", "backward_input", "backward_weight")
        if (seconds := getattr(stage, name)) is not None
    }
    return replace(stage, **parts)


def timeline_of(found: Plan, factors: tuple[float, ...]) -> Timeline:
    """A step of ``found`` whose stages take that many times as long as planned."""
    stages = tuple(slower(stage, factor) for stage, factor in zip(found.stages, factors, strict=True))
    return replace(found, stages=stages).timeline


# What to plan, and not the plans: Hypothesis would write them out in full.
ways = st.tuples(st.sampled_from(["1f1b", "fill_drain", "zero_bubble"]), st.sampled_from(["never", "always"]))
factors = st.tuples(*[st.sampled_from([0.5, 1.0, 1.5, 3.0])] * 2)


@settings(max_examples=30)
@given(ways, factors)
def test_a_step_is_believed_and_no_balance_is_worse_than_to_stay(way: tuple[str, str], factors: tuple[float, ...]):
    found = planned(*way)
    timeline = timeline_of(found, factors)
    again = found.update(timeline)
    assert (again.chunks, again.schedule, again.modes) == (found.chunks, found.schedule, found.modes)
    assert again.predicted.seconds.mid <= timeline.makespan * 1.02 + 1e-3
    assert sum(again.sizes) == sum(found.sizes)
    if again.sizes == found.sizes:
        for new, old, factor in zip(again.stages, found.stages, factors, strict=True):
            assert new.forward == pytest.approx(factor * old.forward, rel=0.02)
            assert new.backward == pytest.approx(factor * old.backward, rel=0.02)


@given(ways)
def test_a_step_as_predicted_changes_nothing(way: tuple[str, str]):
    found = planned(*way)
    again = found.update(found.timeline)
    assert again.timeline.makespan <= found.timeline.makespan * 1.001
    assert again.predicted.seconds.mid == pytest.approx(found.predicted.seconds.mid, rel=0.02)
    assert again.notes[:-1] == found.notes
    assert again.notes[-1].startswith("updated: a recorded step took ")


def test_layers_leave_a_stage_that_is_slow():
    found = planned("1f1b", "never")
    assert found.update(timeline_of(found, (4.0, 1.0))).sizes[0] < found.sizes[0]


@given(factors)
def test_flags_stay_with_their_layers(factors: tuple[float, ...]):
    found = made(chunks=8, schedule="1f1b", memory=3000)
    assert any(isinstance(way, tuple) for way in found.modes)
    again = found.update(timeline_of(found, factors))
    pipe = found.build(model())
    pipe.rebalance(again.balance)
    assert as_flags(pipe.checkpoint, again.balance) == as_flags(again.checkpoint, again.balance)
    pipe.close()


def as_flags(choices: Any, balance: list[int]) -> list[bool]:
    each = zip(choices, balance, strict=True)
    return [flag for way, n in each for flag in ([way == "always"] * n if isinstance(way, str) else way)]


@pytest.mark.parametrize("way", [nullcontext, inline], ids=["threads", "inline"])
def test_a_pipe_is_brought_to_the_new_plan_while_it_trains(way: Any):
    plain, x, y = linears(6), rows(8), rows(8) * 2
    found = plan(plain, x, ["cpu", "cpu"], target=y, loss_fn=loss, chunks=4, calibrate=False)
    pipe = found.build(plain)
    with way():
        for _ in range(3):
            with gpipe.record() as timeline:
                pipe.step(x, y, loss_fn=loss, schedule=found.schedule)
            found = found.update(timeline)
            pipe.rebalance(found.balance)
    assert pipe.balance == found.balance
    assert len(found.notes) == 5
    pipe.close()


class TestRefused:
    def test_a_plan_that_was_read(self) -> None:
        found = planned("1f1b", "never")
        with pytest.raises(ValueError, match=r"not in the file it was read from; make the plan again"):
            Plan.from_json(found.to_json()).update(found.timeline)

    def test_what_is_no_timeline(self) -> None:
        with pytest.raises(TypeError, match=r"timeline: expected a gpipe.Timeline, as record\(\) yields it, got list"):
            planned("1f1b", "never").update([])  # type: ignore[arg-type]

    def test_anything_but_one_step(self) -> None:
        found = planned("1f1b", "never")
        events = found.timeline.events
        for wrong in ([], events[:-1], [*events, *events], made(chunks=4, checkpoint="never").timeline.events):
            with pytest.raises(ValueError, match="timeline: expected one step in seconds, of 8 micro-batches on 2"):
                found.update(Timeline(wrong))
        with pytest.raises(ValueError, match="in ticks"):
            found.update(Timeline(events, unit="ticks"))

    def test_a_step_with_another_balance(self) -> None:
        found = planned("1f1b", "never")
        pipe = found.build(model())
        pipe.rebalance([1, 3] if found.balance != [1, 3] else [2, 2])
        with gpipe.record() as timeline:
            pipe.step(torch.zeros(16, 3), torch.zeros(16, 3), loss_fn=loss, schedule=found.schedule)
        with pytest.raises(ValueError, match=r"timeline: expected layers .* on stage \d, as planned, got .*rebalance"):
            found.update(timeline)
        pipe.close()

"""Foretold timelines: exact where there is a formula, and within the bounds that hold for all."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpipe.schedule import (
    Action,
    Kind,
    Schedule,
    Span,
    Step,
    fill_drain,
    one_forward_one_backward,
    replay,
    zero_bubble,
)
from gpipe.simulate import StageCost, makespan, simulate, stage_costs
from profiler import LayerProfile, Profile

from ..timelines import exact_seconds, fewer, problems

Problem = tuple[Schedule, list[StageCost], list[int]]
shapes = st.tuples(st.integers(1, 16), st.integers(1, 8))


class TestFormulas:
    @given(shapes, exact_seconds, exact_seconds)
    def test_fill_drain_and_1f1b_take_all_cells_and_the_way_in_and_out(
        self, shape: tuple[int, int], forward: float, backward: float
    ) -> None:
        m, n = shape
        for make in (fill_drain, one_forward_one_backward):
            timeline = simulate(make(m, n), [StageCost(forward, backward)] * n)
            assert timeline.makespan == (m + n - 1) * (forward + backward)
            assert timeline.bubble == pytest.approx((n - 1) / (m + n - 1) if forward + backward else 0)


@fewer
@given(problems(), exact_seconds)
def test_events_are_the_steps_of_a_replay(problem: Problem, transfer: float) -> None:
    """What a replay promises is tested with it."""
    schedule, costs, placement = problem
    timeline = simulate(schedule, costs, placement=placement, transfer=transfer)
    hops = [0.0, *(transfer if a != b else 0.0 for a, b in pairwise(placement))]
    spans = replay(schedule.on(placement), [{kind: cost.seconds(kind) for kind in Kind} for cost in costs], hops)
    found = {Step(e.stage, Action(e.kind, e.microbatch)): Span(e.start, e.end, e.wait) for e in timeline.events}
    assert found == spans
    assert timeline.workers == dict(enumerate(placement))


class TestMemory:
    @fewer
    @given(problems())
    @example((zero_bubble(2, 2), [StageCost(1, 2, activation_bytes=1)] * 2, [0, 1]))
    def test_a_micro_batch_is_kept_until_its_last_backward(self, problem: Problem) -> None:
        """The gradients of the weights need the activations: a backward for the inputs alone frees nothing."""
        schedule, costs, placement = problem
        timeline = simulate(schedule, costs, placement=placement)
        held = {Step(e.stage, Action(e.kind, e.microbatch)): e.held_bytes for e in timeline.events}
        for j, program in enumerate(schedule):
            last = {action.microbatch: k for k, action in enumerate(program)}
            recomputed = {action.microbatch: k for k, action in enumerate(program) if action.kind == "recompute"}
            begun = {action.microbatch: k for k, action in enumerate(program) if action.kind == "forward"}
            for k, action in enumerate(program):
                alive = [i for i in last if begun[i] <= k < last[i]]
                inputs = [i for i in alive if k < recomputed.get(i, -1)]
                whole = len(alive) - len(inputs)
                expected = whole * costs[j].activation_bytes + len(inputs) * costs[j].boundary_bytes
                assert held[Step(j, action)] == expected

    def test_two_stages_of_a_device_have_their_peak_together(self) -> None:
        costs = [StageCost(1, 2, activation_bytes=size) for size in (1, 10, 100, 1000)]
        timeline = simulate(fill_drain(3, 4), costs, placement=[0, 1, 0, 1])
        assert timeline.peak_bytes == {0: 3, 1: 30, 2: 300, 3: 3000}
        assert timeline.device_peak_bytes == {"device 0": 303, "device 1": 3030}


class TestLinks:
    @fewer
    @given(problems())
    def test_every_crossing_carries_a_value_forth_and_a_gradient_back(self, problem: Problem) -> None:
        schedule, costs, placement = problem
        timeline = simulate(schedule, costs, placement=placement)
        microbatches = 1 + max(action.microbatch for action in schedule[0])
        for kinds, behind in (({"forward"}, 0), ({"backward", "backward_input"}, 1)):
            for j in range(len(schedule)):
                moved = sum(e.bytes_moved for e in timeline.events if e.stage == j and e.kind in kinds)
                k = j + behind
                crosses = 0 < k < len(schedule) and placement[k - 1] != placement[k]
                assert moved == (microbatches * costs[k].boundary_bytes if crosses else 0)
        assert sum(e.bytes_moved for e in timeline.events if e.kind in ("recompute", "backward_weight")) == 0

    def test_the_time_of_a_crossing_may_depend_on_its_bytes(self) -> None:
        costs = [StageCost(1, 1, boundary_bytes=size) for size in (1000, 100, 10)]
        timeline = simulate(fill_drain(1, 3), costs, transfer=lambda size: size / 100)
        assert timeline.makespan == pytest.approx(6 + 2 * (1 + 0.1))
        assert [e.wait for e in timeline.events if e.stage == 2] == pytest.approx([2 + 1.1, 0])


class TestCosts:
    @given(exact_seconds, exact_seconds)
    def test_what_is_not_told_follows_from_the_rest(self, forward: float, backward: float) -> None:
        cost = StageCost(forward, backward)
        assert cost.seconds("recompute") == forward
        assert cost.seconds("backward_input") == cost.seconds("backward_weight") == backward / 2
        part = replace(cost, backward_weight=backward / 4)
        assert part.seconds("backward_input") == backward * 3 / 4

    @pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
    @pytest.mark.parametrize("name", ["forward", "backward", "recompute", "backward_input", "activation_bytes"])
    def test_impossible_figures(self, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{name}: expected a number that is not negative, got {value}"):
            StageCost(**{"forward": 1, "backward": 1, name: value})

    def test_a_part_that_is_more_than_the_whole(self) -> None:
        with pytest.raises(ValueError, match="backward: 1 seconds are less than the 2 of one of its parts"):
            StageCost(1, 1, backward_input=2)
        assert StageCost(1, 1, backward_input=2, backward_weight=2).seconds("backward") == 1

    def test_one_for_each_stage(self) -> None:
        with pytest.raises(ValueError, match="costs: expected one for each of the schedule's 3 stages, got 2"):
            simulate(fill_drain(2, 3), [StageCost(1, 1)] * 2)
        with pytest.raises(ValueError, match="placement: expected one for each of the schedule's 3 stages, got 1"):
            simulate(fill_drain(2, 3), [StageCost(1, 1)] * 3, placement=[0])

    @pytest.mark.parametrize("run", [simulate, makespan])
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [(-1.0, ValueError), (math.inf, ValueError), ([math.nan], ValueError), ("fast", TypeError), (None, TypeError)],
    )
    def test_impossible_transfers(self, run: Any, wrong: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="transfer: expected seconds"):
            run("1f1b", [StageCost(1, 2)] * 2, microbatches=2, transfer=wrong)

    def test_a_schedule_that_never_ends(self) -> None:
        with pytest.raises(ValueError, match="forever"):
            simulate(Schedule.parse("F0 B0 F1 B1\nF0 F1 B0 B1"), [StageCost(1, 1)] * 2)


def profile_of(layers: int, device: str = "cpu", seconds: bool = True) -> Profile:
    """Layer k takes 2ᵏ seconds forward and twice that backward, keeps 10ᵏ bytes, and hands on k."""
    records = tuple(
        LayerProfile(
            name=f"layer{k}",
            kind="Linear",
            forward_seconds=2.0**k if seconds else None,
            backward_seconds=2.0**k * 2 if seconds else None,
            trainable_bytes=0,
            frozen_bytes=0,
            buffer_bytes=0,
            saved_bytes=10**k,
            output_bytes=k,
            peak_bytes=0,
            flops=0,
        )
        for k in range(layers)
    )
    return Profile(records, device, torch="2", threads=1, chunks=4, rows=8, rounds=3)


class TestProfiles:
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def test_stages_cost_what_their_layers_cost(self, balance: list[int]) -> None:
        layers, ends = sum(balance), list(accumulate(balance))
        costs = stage_costs(profile_of(layers), balance, input_bytes=99)
        assert sum(cost.forward for cost in costs) == 2.0**layers - 1
        assert sum(cost.backward for cost in costs) == 2 * (2.0**layers - 1)
        assert sum(cost.activation_bytes for cost in costs) == int("1" * layers)
        assert [cost.boundary_bytes for cost in costs] == [99, *(end - 1 for end in ends[:-1])]
        assert ", ".join(cost.layers for cost in costs) == ", ".join(f"layer{k}" for k in range(layers))

    def test_other_micro_batches_than_profiled(self) -> None:
        (half,) = stage_costs(profile_of(2), [2], chunks=8)
        profile = profile_of(2)
        assert stage_costs(profile, [2], chunks=profile.chunks) == stage_costs(profile, [2])
        assert stage_costs(profile, [2], chunks=1)[0].forward == pytest.approx(8 * half.forward)
        assert (half.forward, half.backward, half.activation_bytes) == (1.5, 3.0, round(11 / 2))

    def test_on_cuda_a_stage_keeps_a_copy_of_its_input(self) -> None:
        there = stage_costs(profile_of(4, "cuda:0"), [3, 1], input_bytes=5)
        here = stage_costs(profile_of(4), [3, 1], input_bytes=5)
        assert [a.activation_bytes - b.activation_bytes for a, b in zip(there, here, strict=True)] == [0, 2]

    @pytest.mark.parametrize("balance", [[1, 1], [3, 1], [3, 0], []])
    def test_a_balance_of_another_model(self, balance: list[int]) -> None:
        with pytest.raises(ValueError, match="balance: expected positive numbers that sum up to 3 layers"):
            stage_costs(profile_of(3), balance)

    @given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(["1f1b", "fill_drain"]))
    def test_a_profile_without_seconds_tells_bytes(self, balance: list[int], schedule: str) -> None:
        """Each stage keeps what it would keep at any speed, and times are ticks."""
        timed, blind = (stage_costs(profile_of(sum(balance), seconds=seconds), balance) for seconds in (True, False))
        assert [(cost.forward, cost.backward, cost.timed) for cost in blind] == [(1, 2, False)] * len(balance)
        expected, found = (simulate(schedule, costs, microbatches=5) for costs in (timed, blind))
        assert found.peak_bytes == expected.peak_bytes
        assert (expected.unit, found.unit) == ("s", "ticks")
        assert found.makespan == 3 * (5 + len(balance) - 1)

"""Predicted timelines: equal to closed formulas, and within general bounds."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gpipe.schedule import Action, Kind, Span, Step, fill_drain, one_forward_one_backward, replay, zero_bubble
from gpipe.simulate import Link, StageCost, makespan, simulate, stage_costs
from profiler import AllocationTracker, Profile, profile

from ..plans import layer
from ..timelines import Problem, exact_seconds, fewer, problems


@given(st.integers(1, 16), st.integers(1, 8), exact_seconds, exact_seconds)
def test_makespan_of_fill_drain_and_1f1b(m: int, n: int, forward: float, backward: float) -> None:
    for make in (fill_drain, one_forward_one_backward):
        timeline = simulate(make(m, n), [StageCost(forward, backward)] * n)
        assert timeline.makespan == (m + n - 1) * (forward + backward)
        assert timeline.bubble == pytest.approx((n - 1) / (m + n - 1) if forward + backward else 0)


@fewer
@given(problems(), exact_seconds)
@example(
    (zero_bubble(2, 2), [StageCost(1, 2, activation_bytes=j, boundary_bytes=7 * j) for j in range(2)], [0, 1]), 0.0
)
def test_events_match_replayed_steps(problem: Problem, transfer: float):
    """The weight backward needs the activations, so the input backward frees nothing."""
    schedule, costs, placement = problem
    timeline = simulate(schedule, costs, placement=placement, transfer=transfer)
    hops = [0.0, *(transfer if a != b else 0.0 for a, b in pairwise(placement))]
    spans = replay(schedule.on(placement), [{kind: cost.seconds(kind) for kind in Kind} for cost in costs], hops)
    events = {Step(e.stage, Action(e.kind, e.microbatch)): e for e in timeline.events}
    assert {step: Span(e.start, e.end, e.wait) for step, e in events.items()} == spans
    assert timeline.workers == dict(enumerate(placement))
    crossing = [
        0,
        *(cost.boundary_bytes if a != b else 0 for cost, (a, b) in zip(costs[1:], pairwise(placement), strict=True)),
        0,
    ]
    for j, program in enumerate(schedule):
        place = {(a.kind, a.microbatch): k for k, a in enumerate(program)}
        last = {a.microbatch: k for k, a in enumerate(program)}
        for k, action in enumerate(program):
            alive = [i for i in last if place["forward", i] <= k < last[i]]
            inputs = [i for i in alive if k < place.get(("recompute", i), -1)]
            whole = len(alive) - len(inputs)
            expected = whole * costs[j].activation_bytes + len(inputs) * costs[j].boundary_bytes
            assert events[Step(j, action)].held_bytes == expected
            into = {Kind.FORWARD: j, Kind.BACKWARD: j + 1, Kind.BACKWARD_INPUT: j + 1}.get(action.kind)
            assert events[Step(j, action)].bytes_moved == (0 if into is None else crossing[into])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2), st.integers(0, 10**3)), max_size=4))
def test_each_link_may_have_its_own(links: list[tuple[int, float, int]]) -> None:
    """A micro-batch crosses each link once forth and once back; one from a worker to itself takes no time."""
    costs = [StageCost(1, 2, boundary_bytes=size) for size in (0, *(size for _, _, size in links))]
    each = [Link(latency, bandwidth) for latency, bandwidth, _ in links]
    found = simulate("1f1b", costs, microbatches=1, transfer=each)
    crossing = sum(latency + size / bandwidth for latency, bandwidth, size in links)
    assert found.makespan == 3 * len(costs) + 2 * crossing
    alone = simulate("1f1b", costs, microbatches=1, transfer=each, placement=[0] * len(costs))
    assert alone.makespan == 3 * len(costs)
    with pytest.raises(ValueError, match=rf"transfer: expected one entry per link \({len(links)}\)"):
        simulate("1f1b", costs, microbatches=1, transfer=[*each, 1.0])


@given(exact_seconds, exact_seconds)
def test_what_is_not_told_follows_from_the_rest(forward: float, backward: float) -> None:
    cost = StageCost(forward, backward)
    assert cost.seconds("recompute") == forward
    assert cost.seconds("backward_input") == cost.seconds("backward_weight") == backward / 2
    assert StageCost(forward, backward, backward_weight=backward / 4).seconds("backward_input") == backward * 3 / 4


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["forward", "backward", "recompute", "backward_input", "activation_bytes"])
def test_impossible_figures_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a finite, non-negative number, got {value}"):
        StageCost(**{"forward": 1, "backward": 1, name: value})


def test_backward_part_larger_than_whole_raises() -> None:
    with pytest.raises(ValueError, match="backward_weight: expected a finite, non-negative number, got -1"):
        StageCost(1, 1, backward_input=2)
    assert StageCost(1, 1, backward_input=2, backward_weight=2).seconds("backward") == 1


@pytest.mark.parametrize("wrong", [{"latency": -1}, {"latency": math.inf}, {"bandwidth": 0}, {"bandwidth": math.nan}])
def test_what_is_no_link_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Link(**wrong)


@pytest.mark.parametrize("run", [simulate, makespan])
@pytest.mark.parametrize(
    ("wrong", "error"), [(-1.0, ValueError), ([math.nan], ValueError), ("fast", TypeError), (None, TypeError)]
)
def test_impossible_transfers_are_refused(run: Any, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"transfer: expected (finite, non-negative )?seconds"):
        run("1f1b", [StageCost(1, 2)] * 2, microbatches=2, transfer=wrong)


def test_costs_are_one_for_each_stage() -> None:
    with pytest.raises(ValueError, match=r"costs: expected one per stage of the schedule \(3\), got 2"):
        simulate(fill_drain(2, 3), [StageCost(1, 1)] * 2)


def profile_of(layers: int, device: str = "cpu", seconds: bool = True) -> Profile:
    """Layer k takes 2ᵏ seconds forward and twice that backward, keeps 10ᵏ bytes, and hands on k."""
    records = [layer(f"layer{k}", 2.0**k, 10**k - k, 0, k, rows=1) for k in range(layers)]
    if not seconds:
        records = [replace(each, forward_seconds=None, backward_seconds=None) for each in records]
    return Profile(tuple(records), device, torch="2", threads=1, chunks=4, rows=8, rounds=3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_stages_cost_what_their_layers_cost(balance: list[int]) -> None:
    layers, ends = sum(balance), list(accumulate(balance))
    costs = stage_costs(profile_of(layers), balance, input_bytes=99)
    assert sum(cost.forward for cost in costs) == 2.0**layers - 1
    assert sum(cost.backward for cost in costs) == 2 * (2.0**layers - 1)
    assert sum(cost.activation_bytes for cost in costs) == int("1" * layers)
    assert [cost.boundary_bytes for cost in costs] == [99, *(end - 1 for end in ends[:-1])]
    assert ", ".join(cost.layers for cost in costs) == ", ".join(f"layer{k}" for k in range(layers))
    blind = stage_costs(profile_of(layers, seconds=False), balance, input_bytes=99)
    assert [(cost.forward, cost.backward) for cost in blind] == [(1, 2)] * len(balance)
    assert [cost.activation_bytes for cost in blind] == [cost.activation_bytes for cost in costs]


def test_cuda_stage_stores_copy_of_input() -> None:
    there = stage_costs(profile_of(4, "cuda:0"), [3, 1], input_bytes=5)
    here = stage_costs(profile_of(4), [3, 1], input_bytes=5)
    assert [a.activation_bytes - b.activation_bytes for a, b in zip(there, here, strict=True)] == [0, 2]


@pytest.mark.parametrize("balance", [[1, 1], [3, 1], [3, 0], []])
def test_a_balance_of_another_model_is_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="balance: expected positive numbers that sum to 3 layers"):
        stage_costs(profile_of(3), balance)


@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 3, 2]], ids=str)
def test_stages_keep_what_is_alive_after_their_forwards(balance: list[int]) -> None:
    model = nn.Sequential(*[make() for _ in range(3) for make in (lambda: nn.Linear(8, 8), nn.ReLU)])
    x, first = torch.rand(4, 8, requires_grad=True), 0
    for size, cost in zip(balance, stage_costs(profile(model, x, device="cpu", timeout=1e-6), balance), strict=True):
        entered = x.detach().requires_grad_() * 1
        with AllocationTracker() as tracker:
            output = model[first : first + size](entered)
        del entered  # a later layer may hold it, which did not make it
        assert cost.activation_bytes == tracker.alive()
        first += size
    del output

"""The rank of the first stage decides as one process does that knows the same of all stages."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe.distributed._choosing import RankChooser
from gpipe.distributed._opening import Opening
from gpipe.engine._stage import Stage, stages_of
from gpipe.schedule import SPLIT_SECONDS, Kind, named
from gpipe.skip import inspect_skip_layout
from gpipe.timeline._chooser import RUNS, Chooser, Plan, Size
from gpipe.timeline._events import Event
from microbatch import Batch

from ..layers import linears, rows

N = 4
STAGES = st.sets(st.integers(0, N - 1))


class Problem(NamedTuple):
    """Of four stages: the rank of each, what their actions take, which are frozen, and which cannot be split."""

    ranks: list[int]
    seconds: dict[tuple[int, Kind], float]
    frozen: list[set[int]]
    whole: set[int]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ranks = draw(st.permutations([0, 1, draw(st.integers(0, 1)), draw(st.integers(0, 1))]))
    costs = st.sampled_from([SPLIT_SECONDS / 8, SPLIT_SECONDS, SPLIT_SECONDS * 8])
    seconds = {(j, kind): draw(costs) for j in range(N) for kind in Kind}
    return Problem(ranks, seconds, draw(st.lists(STAGES, min_size=1, max_size=2)), draw(STAGES))


@given(problems(), st.sampled_from(["auto", "zero_bubble"]), st.booleans())
def test_all_decide_as_one_process(problem: Problem, schedule: str, grad: bool) -> None:
    """But that a stage which has been frozen on another rank is known to be only after a step."""
    stages, ranks = _stages(), problem.ranks
    alone, members = Chooser(stages), [_member(stages, ranks, me) for me in range(2)]
    first, batches = members[ranks[0]], [Batch(each) for each in rows(12, grad=grad).chunk(6)]
    size = Size(len(batches), tuple(ranks), (0,) * N)
    for frozen in problem.frozen:
        for stage in stages:
            stage.module.requires_grad_(stage.index not in frozen)
        _meet(members)
        for _ in range(RUNS + 1):
            plan, expected = first.plan(schedule, batches, size), alone.plan(schedule, batches, size)
            assert plan.schedule == expected.schedule == _told(plan).schedule
            assert (plan.recorder is None) == (expected.recorder is None) == (_told(plan).recorder is None)
            for chooser, each in ((first, plan), (alone, expected)):
                _run(each, size, problem.seconds)
                chooser.learn(each)
            for stage in stages:
                stage.runs_whole = stage.index in problem.whole
            _meet(members)


def _stages() -> list[Stage]:
    modules = [nn.Sequential(layer) for layer in linears(N)]
    return stages_of(modules, [torch.device("cpu")] * N, inspect_skip_layout(modules))


def _member(stages: list[Stage], ranks: list[int], me: int) -> RankChooser:
    trained = [[j for j in range(N) if ranks[j] == k] for k in range(2)]
    return RankChooser([stage for stage in stages if ranks[stage.index] == me], me, trained)


def _meet(members: list[RankChooser]) -> None:
    reports = json.loads(json.dumps([member.news() for member in members]))
    for member in members:
        member.hear(reports)


def _told(plan: Plan) -> Plan:
    """The plan, as another rank has it."""
    opening, other = Opening(), Opening()
    opening.plan = plan
    other.hear(json.loads(json.dumps(opening.told())))
    assert other.plan is not None
    return other.plan


def _run(plan: Plan, size: Size, seconds: dict[tuple[int, Kind], float]) -> None:
    """As if somebody had: the recorder knows what the actions took."""
    schedule: Any = plan.schedule
    if plan.recorder is not None:
        for j, program in enumerate(named(schedule.name, *size, schedule.split)):
            for kind, i in program:
                plan.recorder.timeline.add(Event(j, i, kind, "cpu", 0.0, seconds[j, kind]))

"""A pipe measures its cells and adapts its schedule, with the same gradients for every choice."""

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import Event, GPipe, record
from gpipe._chooser import RUNS, Chooser
from gpipe.engine._worker_steps import Size
from gpipe.schedule import SPLIT_SECONDS, SPLITTING, Choice, Kind, Schedule, choose, in_flight, named, validate
from gpipe.schedule._named import usual_placement
from microbatch import Batch

from .layers import Layer, each_way, gradients, linears, piped, rows

Block = Callable[[], AbstractContextManager[Any]]
FAST, SLOW = SPLIT_SECONDS / 1e6, SPLIT_SECONDS


def ticking(monkeypatch: pytest.MonkeyPatch, tick: float) -> None:
    """Advance the clock by ``tick`` on every read."""
    ticks = count()
    monkeypatch.setattr("gpipe.timeline._record.time", SimpleNamespace(perf_counter=lambda: tick * next(ticks)))


def stepped(pipe: GPipe, schedule: Schedule | str, x: Tensor | None = None) -> Tensor:
    x = rows() if x is None else x
    return pipe.step(x, torch.zeros_like(x), loss_fn=F.mse_loss, schedule=schedule)


def kinds(pipe: GPipe, schedule: Schedule | str, x: Tensor | None = None) -> list[str]:
    """Return the letters of the actions recorded for each stage in a step."""
    with record() as timeline:
        stepped(pipe, schedule, x)
    return [
        "".join(letter for letter in "FRBIW" if letter in {e.kind.letter for e in timeline.events if e.stage == j})
        for j in range(len(pipe.partitions))
    ]


def three(mode: str = "never") -> GPipe:
    return piped(linears(), [1, 1, 1], chunks=3, checkpoint=mode)


def train(chooser: Chooser, schedule: str, x: Tensor, stages: int, seconds: Callable[[int, Kind], float]) -> Choice:
    """Simulate a step whose cells take ``seconds`` or, sometimes, longer."""
    batches = [Batch(each) for each in x.chunk(6)]
    size = Size(len(batches), tuple(usual_placement(schedule, stages)), (0,) * stages)
    planned, recorder = chooser.plan(schedule, batches, size)
    choice = chooser.last
    assert choice is not None
    assert planned is (choice.schedule or choice)
    if recorder is not None:
        for j, program in enumerate(named(choice.name, *size.order, choice.split)):
            for kind, i in program:
                recorder.timeline.add(Event(j, i, kind, "cpu", 0.0, seconds(j, kind) * (1 if i else 9)))
    chooser.learn()
    return choice


@st.composite
def costs(draw: st.DrawFn) -> dict[tuple[int, Kind], float]:
    seconds = st.floats(SPLIT_SECONDS / 8, SPLIT_SECONDS * 8)
    return {(j, kind): draw(seconds) for j in range(4) for kind in Kind}


@given(costs(), st.booleans())
def test_auto_settles_on_what_the_measurements_say(cost: dict[tuple[int, Kind], float], grad: bool) -> None:
    chooser, x = Chooser(three()._pipeline.stages), rows(grad=grad)
    choices = [
        train(chooser, "auto", x, 3, lambda j, kind, k=k: cost[j, kind] * (2 - (k % RUNS == 0)))
        for k in range(8 * RUNS)
    ]
    assert choices[:RUNS] == [Choice("1f1b")] * RUNS
    assert chooser._planned is None  # and no later step is recorded
    ran = {(choice.name, choice.split) for choice in choices}
    seen = {(j, a.kind) for name, split in ran for j, p in enumerate(named(name, 6, range(3), 0, split)) for a in p}
    known = {cell: cost[cell] for cell in seen}
    assert choices[-1] == choose(6, (0, 1, 2), 0, known, range(0 if grad else 1, 3))


@given(st.sampled_from(SPLITTING), costs(), st.booleans())
def test_split_schedules_settle_on_fastest_choice(name: str, cost: dict[tuple[int, Kind], float], grad: bool) -> None:
    chooser, x = Chooser(piped(linears(4), [1] * 4)._pipeline.stages), rows(grad=grad)
    choices = [
        train(chooser, name, x, 4, lambda j, kind, k=k: cost[j, kind] * (2 - (k % RUNS == 0))) for k in range(8 * RUNS)
    ]
    split = tuple(range(0 if grad else 1, 4))
    assert [choice.split for choice in choices[:RUNS]] == [split] * RUNS
    parts = {j: cost[j, Kind.BACKWARD_INPUT] + cost[j, Kind.BACKWARD_WEIGHT] for j in split}
    short = {j for j in split if parts[j] < SPLIT_SECONDS}
    if name == "dualpipev":  # also does whole backwards, whose times count instead of the sum of the parts
        short = set(split)
    whole = {j for j in short if cost[j, Kind.BACKWARD] < SPLIT_SECONDS}
    assert choices[-1].split == tuple(j for j in split if j not in whole)


@pytest.mark.parametrize("change", ["size", "eval", "freeze", "grad"])
def test_changed_cells_are_measured_separately(change: str) -> None:
    pipe = three()
    chooser = Chooser(pipe._pipeline.stages)

    def run(count: int, grad: bool = False) -> bool:
        return bool(train(chooser, "auto", rows(count, grad=grad), 3, lambda j, kind: SLOW).seconds)

    assert [run(48) for _ in range(RUNS + 1)] == [False] * RUNS + [True]
    assert run(60)  # as many binary digits
    if change == "eval":
        pipe.eval()
    if change == "freeze":
        pipe[0].requires_grad_(False)
    assert not run(480 if change == "size" else 48, grad=change == "grad")


@each_way
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("pace", [FAST, SLOW])
def test_gradients_do_not_depend_on_what_is_decided(
    pace: float, grad: bool, way: Block, monkeypatch: pytest.MonkeyPatch
):
    ticking(monkeypatch, pace)
    found, ended = {}, {}
    for schedule in ("1f1b", "zero_bubble", "auto", "search"):
        x = rows(grad=grad)
        with closing(three("except_last")) as pipe, way():
            losses = [stepped(pipe, schedule, x * (k + 1)) for k in range(2 * RUNS + 2)]
            found[schedule] = losses, x.grad, gradients(pipe)
            ended[schedule] = pipe.last_schedule
            does = kinds(pipe, schedule, x)
            assert ["I" in each for each in does] == [j in ended[schedule].split for j in range(3)]
    torch.testing.assert_close(found["zero_bubble"], found["1f1b"], rtol=0, atol=0)
    for measured in ("auto", "search"):
        torch.testing.assert_close(found[measured], found["1f1b"], rtol=1e-10, atol=1e-12)
    assert ended["zero_bubble"].split == (() if pace == FAST else (0, 1, 2) if grad else (1, 2))
    assert set(ended["auto"].seconds) == {"1f1b", "zero_bubble", "fill_drain"}
    assert ended["search"].name == "search"
    assert set(ended["search"].split) <= set(ended["zero_bubble"].split)


@given(costs(), st.booleans())
def test_search_measures_the_named_schedule_and_searches_once(cost: dict[tuple[int, Kind], float], grad: bool) -> None:
    chooser, x = Chooser(three()._pipeline.stages), rows(grad=grad)
    choices = [train(chooser, "search", x, 3, lambda j, kind: cost[j, kind]) for _ in range(RUNS + 3)]
    split = tuple(range(0 if grad else 1, 3))
    assert choices[:RUNS] == [Choice("zero_bubble", split)] * RUNS
    last = choices[-1]
    assert all(choice is last for choice in choices[RUNS:])
    assert chooser._planned is None
    assert last.schedule is not None
    validate(last.schedule, 6, (0, 1, 2))
    assert last.seconds["search"] <= last.seconds["zero_bubble"]
    assert all(in_flight(program) <= 3 for program in last.schedule)


@pytest.mark.parametrize("places", [[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]])
def test_search_is_for_any_placement(places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, SLOW)
    found = {}
    for schedule in ("1f1b", "search"):
        with closing(GPipe(linears(4), [1] * 4, devices=[f"cpu:{place}" for place in places], chunks=4)) as pipe:
            losses = [stepped(pipe, schedule, rows() * (k + 1)) for k in range(RUNS + 2)]
            found[schedule] = losses, gradients(pipe)
            assert pipe.last_schedule is not None
            assert pipe.last_schedule.name == schedule
    assert pipe.last_schedule.schedule is not None
    assert pipe.last_schedule.schedule.on(places) == Schedule.parse(str(pipe.last_schedule.schedule)).on(places)
    torch.testing.assert_close(found["search"], found["1f1b"], rtol=1e-10, atol=1e-12)


@each_way
def test_what_cannot_be_split_is_not_tried_again(way: Block, caplog: pytest.LogCaptureFixture):
    model = nn.Sequential(*linears(1), Layer(lambda s, x: s.m[0](s.m[0](x)), linears(1)[0]), *linears(1))
    with closing(piped(model, [1, 1, 1], chunks=3)) as pipe, way(), caplog.at_level(logging.WARNING, "gpipe"):
        assert kinds(pipe, "zero_bubble")[1] == "FRIW"
        assert kinds(pipe, "zero_bubble")[1] == "FRB"
        assert len(caplog.records) == 1


def test_custom_schedule_is_run_unchanged():
    with closing(three()) as pipe:
        own = named("zero_bubble", 3, (0, 1, 2))
        with record() as timeline:
            stepped(pipe, own)
        assert pipe.last_schedule == Choice("own", (0, 1, 2))
    for j, program in enumerate(own):
        assert list(program) == [(e.kind, e.microbatch) for e in timeline.events if e.stage == j]


def test_failed_or_recorded_steps_are_not_measured():
    with closing(three()) as pipe:
        handle = pipe[1].register_forward_hook(lambda *_: 1 / 0)
        for _ in range(RUNS):
            with pytest.raises(ZeroDivisionError):
                stepped(pipe, "auto")
        handle.remove()
        with record() as timeline:
            for _ in range(RUNS):
                stepped(pipe, "auto")
        assert len(timeline) == RUNS * 18
        for expected in (False,) * RUNS + (True,):
            stepped(pipe, "auto")
            assert bool(pipe.last_schedule.seconds) == expected


def test_a_copy_is_measured_anew():
    with closing(three()) as pipe:
        for _ in range(RUNS + 1):
            stepped(pipe, "auto")
        assert pipe.last_schedule.seconds
        with closing(copy.deepcopy(pipe)) as other:
            assert other.last_schedule is None

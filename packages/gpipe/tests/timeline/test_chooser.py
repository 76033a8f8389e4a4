"""A pipe finds out what its cells take and decides by that, with the same gradients whatever it decides."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import Event, GPipe, record
from gpipe.schedule import SPLIT_SECONDS, SPLITTING, Choice, Kind, Schedule, choose, named
from gpipe.schedule._named import usual_placement
from gpipe.timeline._chooser import RUNS, Chooser, MeasuredCells, Size
from gpipe.timeline._record import Recorder
from microbatch import Batch

from ..layers import gradients, linears, piped, rows

each_way = pytest.mark.parametrize("way", [nullcontext, gpipe.inline], ids=["threads", "inline"])
Block = Callable[[], AbstractContextManager[Any]]
FAST, SLOW = SPLIT_SECONDS / 1e6, SPLIT_SECONDS


def ticking(monkeypatch: pytest.MonkeyPatch, tick: float) -> None:
    """Let the clock go on by ``tick`` whenever somebody looks at it, however long that takes."""
    ticks = count()
    monkeypatch.setattr("gpipe.timeline._record.time", SimpleNamespace(perf_counter=lambda: tick * next(ticks)))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, FAST)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, SLOW)


def stepped(pipe: GPipe, schedule: Schedule | str, x: Tensor | None = None) -> Tensor:
    x = rows() if x is None else x
    return pipe.step(x, torch.zeros_like(x), loss_fn=F.mse_loss, schedule=schedule)


def kinds(pipe: GPipe, schedule: Schedule | str, x: Tensor | None = None) -> list[str]:
    """For each stage, the letters of what it is recorded to do in a step."""
    with record() as timeline:
        stepped(pipe, schedule, x)
    return [
        "".join(letter for letter in "FRBIW" if letter in {e.kind.letter for e in timeline.events if e.stage == j})
        for j in range(len(pipe.partitions))
    ]


def three(mode: str = "never", **options: Any) -> GPipe:
    return piped(linears(), [1, 1, 1], chunks=3, checkpoint=mode, **options)


class TestMeasured:
    def events(self, *seconds: float, stage: int = 0, kind: str = "forward") -> list[Event]:
        return [Event(stage, i, Kind(kind), "cpu", 5.0, 5.0 + each) for i, each in enumerate(seconds)]

    @given(st.lists(st.lists(st.integers(1, 9).map(float), min_size=1), min_size=RUNS, max_size=RUNS))
    def test_the_fastest_run_counts_and_of_that_the_median(self, runs: list[list[float]]) -> None:
        measured = MeasuredCells()
        for run in runs:
            measured.add([*self.events(*run), *self.events(*(2 * each for each in run), stage=1, kind="backward")])
        fastest = min((sorted(run)[len(run) // 2] + sorted(run)[(len(run) - 1) // 2]) / 2 for run in runs)
        assert measured.seconds == {
            (0, Kind.FORWARD): pytest.approx(fastest),
            (1, Kind.BACKWARD): pytest.approx(2 * fastest),
        }


def train(chooser: Chooser, schedule: str, x: Tensor, seconds: Callable[[int, Kind], float]) -> Choice:
    """A step that nobody runs, whose cells take ``seconds``."""
    batches = [Batch(each) for each in x.chunk(6)]
    size = Size(len(batches), tuple(usual_placement(schedule, len(chooser._stages))), 0)
    plan = chooser.plan(schedule, batches, size)
    assert isinstance(plan.schedule, Choice)
    if plan.recorder is not None:
        for j, program in enumerate(named(plan.schedule.name, *size, plan.schedule.split)):
            for kind, i in program:
                plan.recorder.timeline.add(Event(j, i, kind, "cpu", 0.0, seconds(j, kind)))
    chooser.learn(plan)
    return plan.schedule


@st.composite
def costs(draw: st.DrawFn) -> dict[tuple[int, Kind], float]:
    seconds = st.floats(SPLIT_SECONDS / 8, SPLIT_SECONDS * 8)
    return {(j, kind): draw(seconds) for j in range(4) for kind in Kind}


class TestDeciding:
    """By injected durations."""

    @given(costs(), st.booleans())
    def test_auto_settles_on_what_the_measurements_say(self, cost: dict[tuple[int, Kind], float], grad: bool) -> None:
        chooser, x = Chooser(three()._pipeline.stages), rows(grad=grad)
        choices = [train(chooser, "auto", x, lambda j, kind: cost[j, kind]) for _ in range(8 * RUNS)]
        assert choices[:RUNS] == [Choice("1f1b")] * RUNS
        assert len({str(choice) for choice in choices[-RUNS:]}) == 1
        known = next(iter(chooser._measured.values())).seconds
        assert choices[-1] == choose(6, (0, 1, 2), 0, known, range(0 if grad else 1, 3))
        assert all(known[cell] == cost[cell] for cell in known)
        assert not chooser._pending

    @given(st.sampled_from([name for name in SPLITTING if name != "dualpipev"]), costs(), st.booleans())
    def test_those_that_split_settle_on_what_is_worth_it(
        self, name: str, cost: dict[tuple[int, Kind], float], grad: bool
    ) -> None:
        chooser, x = Chooser(piped(linears(4), [1] * 4)._pipeline.stages), rows(grad=grad)
        choices = [train(chooser, name, x, lambda j, kind: cost[j, kind]) for _ in range(8 * RUNS)]
        split = tuple(range(0 if grad else 1, 4))
        assert [choice.split for choice in choices[:RUNS]] == [split] * RUNS
        parts = {j: cost[j, Kind.BACKWARD_INPUT] + cost[j, Kind.BACKWARD_WEIGHT] for j in split}
        short = {j for j in split if parts[j] < SPLIT_SECONDS}
        assert choices[RUNS].split == tuple(j for j in split if j not in short)
        whole = {j for j in short if cost[j, Kind.BACKWARD] < SPLIT_SECONDS}
        assert choices[-1].split == tuple(j for j in split if j not in whole)
        assert not chooser._pending

    @given(costs())
    def test_where_whole_backwards_are_measured_too_they_decide(self, cost: dict[tuple[int, Kind], float]) -> None:
        chooser, x = Chooser(piped(linears(4), [1] * 4)._pipeline.stages), rows()
        choices = [train(chooser, "dualpipev", x, lambda j, kind: cost[j, kind]) for _ in range(2 * RUNS)]
        assert [choice.split for choice in choices[:RUNS]] == [(1, 2, 3)] * RUNS
        worth = tuple(j for j in (1, 2, 3) if cost[j, Kind.BACKWARD] >= SPLIT_SECONDS)
        assert [choice.split for choice in choices[RUNS:]] == [worth] * RUNS

    def test_sizes_are_measured_by_themselves(self) -> None:
        chooser, slow = Chooser(three()._pipeline.stages), dict.fromkeys(Kind, SLOW)

        def run(x: Tensor) -> Choice:
            return train(chooser, "auto", x, lambda j, kind: slow[kind])

        for _ in range(RUNS):
            assert not run(rows(48)).seconds
        assert run(rows(60)).seconds  # as many binary digits
        assert not run(rows(480)).seconds
        assert run(rows(48)).seconds

    @pytest.mark.parametrize("change", ["eval", "freeze", "grad"])
    def test_what_makes_cells_take_longer_is_measured_by_itself(self, change: str) -> None:
        pipe = three()
        chooser = Chooser(pipe._pipeline.stages)
        for _ in range(RUNS + 1):
            choice = train(chooser, "auto", rows(), lambda j, kind: SLOW)
        assert choice.seconds
        if change == "eval":
            pipe.eval()
        if change == "freeze":
            pipe[0].requires_grad_(False)
        assert not train(chooser, "auto", rows(grad=change == "grad"), lambda j, kind: SLOW).seconds


@each_way
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("pace", [FAST, SLOW])
def test_gradients_do_not_depend_on_what_is_decided(
    pace: float, grad: bool, way: Block, monkeypatch: pytest.MonkeyPatch
):
    ticking(monkeypatch, pace)
    found = {}
    for schedule in ("1f1b", "zero_bubble", "auto"):
        x = rows(grad=grad)
        with closing(three("except_last")) as pipe, way():
            losses = [stepped(pipe, schedule, x * (k + 1)) for k in range(2 * RUNS + 2)]
            found[schedule] = losses, x.grad, gradients(pipe)
    torch.testing.assert_close(found["zero_bubble"], found["1f1b"], rtol=0, atol=0)
    torch.testing.assert_close(found["auto"], found["1f1b"], rtol=1e-10, atol=1e-12)


@each_way
class TestZeroBubble:
    @pytest.mark.usefixtures("fast")
    def test_short_backwards_run_whole_when_they_are_known(self, way: Block) -> None:
        with closing(three("except_last")) as pipe, way():
            assert kinds(pipe, "zero_bubble") == ["FRB", "FRIW", "FRIW"]
            for _ in range(RUNS):
                stepped(pipe, "zero_bubble")
                assert pipe.last_schedule == Choice("zero_bubble", (1, 2))
            assert kinds(pipe, "zero_bubble") == ["FRB"] * 3
            assert pipe.last_schedule == Choice("zero_bubble")

    @pytest.mark.usefixtures("slow")
    @pytest.mark.parametrize("grad", [True, False])
    def test_long_ones_are_split_where_the_input_needs_a_gradient(self, grad: bool, way: Block) -> None:
        with closing(three()) as pipe, way():
            for _ in range(2 * RUNS):
                stepped(pipe, "zero_bubble", rows(grad=grad))
            assert kinds(pipe, "zero_bubble", rows(grad=grad)) == ["FIW" if grad else "FB", "FIW", "FIW"]

    @pytest.mark.usefixtures("slow")
    def test_what_cannot_be_split_is_not_tried_again(self, way: Block, caplog: pytest.LogCaptureFixture) -> None:
        class Twice(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(super().forward(x))

        model = nn.Sequential(*linears(1), Twice(3, 3, dtype=torch.float64), *linears(1))
        with closing(piped(model, [1, 1, 1], chunks=3)) as pipe, way(), caplog.at_level(logging.WARNING, "gpipe"):
            assert kinds(pipe, "zero_bubble")[1] == "FRIW"
            assert kinds(pipe, "zero_bubble")[1] == "FRB"
            assert len(caplog.records) == 1

    @pytest.mark.usefixtures("fast")
    def test_a_schedule_of_your_own_is_done_as_it_is(self, way: Block) -> None:
        with closing(three()) as pipe, way():
            for _ in range(3 * RUNS):
                stepped(pipe, "zero_bubble")
            own = named("zero_bubble", 3, (0, 1, 2))
            with record() as timeline:
                stepped(pipe, own)
        for j, program in enumerate(own):
            assert list(program) == [(e.kind, e.microbatch) for e in timeline.events if e.stage == j]
        assert pipe.last_schedule == Choice("own", (0, 1, 2))


@each_way
class TestAuto:
    @pytest.mark.usefixtures("slow")
    def test_it_does_what_it_says(self, way: Block) -> None:
        with closing(three()) as pipe, way():
            for _ in range(3 * RUNS):
                stepped(pipe, "auto")
            with record() as timeline:
                stepped(pipe, "auto")
            choice = pipe.last_schedule
        assert choice is not None
        assert set(choice.seconds) == {"1f1b", "zero_bubble", "fill_drain"}
        for j, program in enumerate(named(choice.name, 3, (0, 1, 2), 0, choice.split)):
            done = Counter((e.kind, e.microbatch) for e in timeline.events if e.stage == j)
            assert done == Counter(program)


class TestMeasuring:
    @pytest.fixture
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many actions each of the recorded runs has done, in the end."""
        timelines: list[Any] = []
        begin = Recorder.begin

        def noted(self: Recorder, placement: Sequence[int]) -> Any:
            timelines.append(self.timeline)
            return begin(self, placement)

        monkeypatch.setattr(Recorder, "begin", noted)
        return timelines

    @pytest.mark.parametrize("schedule", ["auto", "zero_bubble"])
    @pytest.mark.usefixtures("fast")
    def test_only_the_first_steps_are_measured(self, schedule: str, watched: list[Any]) -> None:
        with closing(three()) as pipe:
            for _ in range(4 * RUNS):
                stepped(pipe, schedule)
        assert len(watched) == (RUNS if schedule == "auto" else 2 * RUNS)

    def test_a_caller_who_records_sees_everything_and_is_not_disturbed(self, watched: list[Any]) -> None:
        with closing(three()) as pipe:
            with record() as timeline:
                for _ in range(RUNS):
                    stepped(pipe, "auto")
            assert watched == [timeline] * RUNS
            assert len(timeline) == RUNS * 18
            stepped(pipe, "auto")
            assert pipe.last_schedule == Choice("1f1b")

    def test_a_step_that_fails_teaches_nothing(self) -> None:
        with closing(three()) as pipe:
            handle = pipe[1].register_forward_hook(lambda *_: 1 / 0)
            for _ in range(RUNS):
                with pytest.raises(ZeroDivisionError):
                    stepped(pipe, "auto")
            handle.remove()
            stepped(pipe, "auto")
            stepped(pipe, "auto")
            assert pipe.last_schedule == Choice("1f1b")

    def test_a_copy_is_measured_anew(self) -> None:
        with closing(three()) as pipe:
            for _ in range(RUNS + 1):
                stepped(pipe, "auto")
            assert pipe.last_schedule is not None
            assert pipe.last_schedule.seconds
            with closing(copy.deepcopy(pipe)) as other:
                assert other.last_schedule is None

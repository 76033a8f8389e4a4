"""``record()`` records the actions of the schedule, in a possible order; nothing is recorded outside it."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.streams.tests.accelerator import accelerator
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import Event, GPipe, record
from gpipe.schedule import SCHEDULES, Action, Schedule, Step, dependencies_of, fill_drain, named
from gpipe.timeline._record import Clock, Look
from gpipe.timeline._svg import svg
from gpipe.transport._transport import Link
from gpipe.values._leaves import Activation

from ..layers import Call, each_way, linears, piped, rows, within
from ..schedules import fitting

Block = Callable[[], AbstractContextManager[Any]]


def stepped(pipe: GPipe, schedule: str | Schedule, count: int) -> None:
    pipe.step(rows(count), rows(count), loss_fn=F.mse_loss, schedule=schedule)


def step_of(event: Event) -> Step:
    return Step(event.stage, Action(event.kind, event.microbatch))


@st.composite
def runs(draw: st.DrawFn) -> tuple[GPipe, str | None, Schedule]:
    """Draw a pipe, a schedule or None (a call and the caller's backward), and the expected actions."""
    m, name = draw(st.integers(1, 5)), draw(st.sampled_from([None, *sorted(SCHEDULES)]))
    placement = fitting(name or "interleaved", draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    n = len(placement)
    mode = draw(st.sampled_from(["never", "except_last", "always"]))
    stop = {"never": 0, "except_last": m - 1, "always": m}[mode]
    devices = [f"cpu:{worker}" for worker in placement]
    pipe = GPipe(linears(n), [1] * n, devices=devices, chunks=m, checkpoint=mode)
    return pipe, name, fill_drain(m, n, stop) if name is None else programs_of(name, m, pipe, stop)


def programs_of(name: str, m: int, pipe: GPipe, stop: int) -> Schedule:
    """Return the actions of a step whose input requires no grad, so that the first stage does not split."""
    return named(name, m, pipe._workers.placement, stop, split=range(1, len(pipe.partitions)))


@settings(max_examples=settings.default.max_examples // 2)
@given(runs())
def test_actions_are_recorded_once_in_possible_order(run: tuple[GPipe, str | None, Schedule]):
    pipe, name, programs = run
    m = pipe.chunks
    with closing(pipe), record() as timeline:
        pipe(rows(m)).square().sum().backward() if name is None else stepped(pipe, name, m)
    events = timeline.events
    expected = [Step(j, action) for j, program in enumerate(programs) for action in program]
    assert Counter(map(step_of, events)) == Counter(expected)
    assert all(0 <= e.start <= e.end and e.wait >= 0 and e.bytes_moved == 0 for e in events)
    assert {e.device for e in events} <= {"cpu"}
    for lane in timeline.lanes.values():
        assert all(a.end <= b.start for a, b in pairwise(lane))
    for j, program in enumerate(programs):
        assert [step_of(e).action for e in events if e.stage == j] == list(program)
    starts = {step_of(e): e.start for e in events}
    for step in expected:
        for needed in dependencies_of(step):
            assert needed not in starts or starts[needed] <= starts[step]
    assert timeline.workers == dict(enumerate(pipe._workers.placement))
    assert [e.layers for e in events] == [f"'{e.stage}'" for e in events]


def test_waiting_for_a_link_is_no_work(monkeypatch: pytest.MonkeyPatch):
    """The clock ticks on every read: before an action, when its input has arrived, and after it."""
    monkeypatch.setattr("gpipe.timeline._record.time", SimpleNamespace(perf_counter=map(float, count()).__next__))
    pipe = piped(linears(), [1, 2], chunks=2, checkpoint="always")
    with record() as timeline, gpipe.inline():
        stepped(pipe, "zero_bubble", 4)
    assert {event.seconds for event in timeline.events} == {1}
    # The caller's input is there, and needs no gradient; the last stage gets its gradients from the loss.
    links = {("forward", 1), ("backward", 0)}
    assert all(event.wait == ((event.kind, event.stage) in links) for event in timeline.events)
    assert sum(event.wait for event in timeline.events) == 4


COURIER = SimpleNamespace(send=lambda payload: payload, receive=lambda payload: payload)
"""A carrier between two devices that share memory."""


@pytest.mark.parametrize(("carrier", "moved"), [(COURIER, 24 + 8), (None, 0)])
def test_bytes_that_cross_between_devices(carrier: Any, moved: int):
    look = Look(lambda: 0.0)
    link = Link[Any]("values", carrier, got=look.got)
    link.put(0, Activation((torch.zeros(3, dtype=torch.float64), None)))
    link.put(1, [None, torch.zeros(2)])
    assert link.get(1)[0] is None
    assert link.get(0).tensors[0].shape == (3,)
    assert look.bytes_moved == moved


def test_wait_lasts_until_input_arrives():
    """The streams are fakes, with clocks controlled by the test."""
    with accelerator("xpu") as fake:
        clock, stream, device = Clock(), fake.stream(0, 0), torch.device("xpu", 0)
        look = Look(lambda: clock.now(device))
        stream.clock += 3
        look.got([], moved=False)
        stream.clock += 4
        look.got([], moved=False)
        stream.clock += 2
        end = clock.now(device)
        assert [b() - a() for a, b in look.waits] == pytest.approx([3, 4])
        assert end() - look.start() == pytest.approx(2)


def test_record_covers_only_runs_started_in_block():
    pipe = piped(linears(), [1, 2], chunks=2, checkpoint="never")
    with record() as timeline:
        output = pipe(rows(4))
        within(60, lambda: stepped(pipe, "1f1b", 4))
    assert len(timeline) == 4
    stepped(pipe, "1f1b", 4)
    output.sum().backward()
    assert Counter(e.kind for e in timeline.events) == {"forward": 4, "backward": 4}


def test_failed_action_is_not_recorded():
    pipe = piped(linears(), [1, 1, 1], chunks=3, checkpoint="never")
    calls: list[int] = []

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("no")

    pipe[1].register_forward_hook(fail)
    with record() as timeline, gpipe.inline(), pytest.raises(ArithmeticError):
        stepped(pipe, "fill_drain", 3)
    names = [str(event) for event in timeline.events]
    assert "F0@1" in names
    assert "F1@1" not in names


@each_way
def test_bytes_of_storages(way: Block) -> None:
    """Each exponential saves its own output, once, although the stage also sends it."""
    size, m = 2 * 5 * 8, 3
    model = nn.Sequential(Call(torch.exp), Call(torch.exp))
    pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=m, checkpoint="never")
    x = torch.zeros(2 * m, 5, dtype=torch.float64, requires_grad=True)
    with record(memory=True) as timeline, way():
        output = pipe(x)
    copied = size  # of the first input, until it is known that the layers leave it as it is
    assert timeline.peak_bytes == {0: m * size + copied, 1: m * size}
    assert [e.held_bytes - copied for e in timeline.events if e.stage == 0] == [size, 2 * size, 3 * size]
    assert output.shape == x.shape
    pipe.close()


def test_runs_that_overlap_are_counted_one_by_one() -> None:
    """Inline, since whether a gradient on its way is still its sender's would be a matter of timing."""
    pipe = piped(linears(), [1, 2], chunks=2, checkpoint="never")
    found = []
    for others in (0, 1):
        with record(memory=True) as timeline, gpipe.inline():
            output = pipe(rows(4))
            between = [pipe(rows(4)) for _ in range(others)]
            seen = len(timeline)
            output.sum().backward()
        backward = timeline.events[seen:]
        found.append({j: [e.held_bytes for e in backward if e.stage == j] for j in range(2)})
        assert len(between) == others
    assert found[0] == found[1]


def test_profilers_see_actions_by_their_names_inline():
    pipe = piped(linears(), [1, 2], chunks=2, checkpoint="always")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, gpipe.inline():
        stepped(pipe, "zero_bubble", 4)
    found = Counter(e.name for e in profile.events() if e.name.startswith("gpipe "))
    programs = named("zero_bubble", 2, (0, 0), 2, split=[1])  # the input needs no gradient
    assert found == Counter(f"gpipe {action}@{j}" for j, program in enumerate(programs) for action in program)


def test_full_batch_loss_is_recorded_on_last_stage() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu"] * 2, chunks=3)
    with gpipe.record() as timeline:
        pipe.step(torch.ones(6, 2), loss_fn=lambda output: output.std(0).sum())
    (event,) = [event for event in timeline.events if event.kind == "loss"]
    assert str(event) == "C@1"
    on_last = [each for each in timeline.events if each.stage == 1]
    assert all(each.end <= event.start for each in on_last if each.kind == "forward")
    assert all(each.start >= event.end for each in on_last if each.kind == "backward")
    picture = svg([("a step", timeline)])
    assert "micro-batch: all" in picture
    assert ">loss<" in picture
    assert "loss" in str(timeline).splitlines()[1]

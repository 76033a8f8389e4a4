"""Properties and construction of a timeline."""

import math
import re
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe import Event, Timeline
from profiler.text import format_bytes, format_seconds

from ..timelines import events, fewer, timelines


def event(stage: int, start: float, end: float, **more: object) -> Event:
    return replace(Event(stage, 0, "forward", "cpu", start, end), **more)


@fewer
@given(timelines, st.sampled_from([0.25, 2.0, 1024.0]))
def test_idle_and_busy_time_add_up(timeline: Timeline, factor: float) -> None:
    """The shares do not depend on the unit of time."""
    shares = timeline.utilization
    assert all(0 <= share <= 1 for share in shares.values())
    assert math.isclose(sum(shares.values()) + timeline.bubble * len(shares), len(shares), abs_tol=1e-9)
    slower = (replace(each, start=each.start * factor, end=each.end * factor) for each in timeline.events)
    again = Timeline(slower, timeline.workers)
    assert again.makespan == timeline.makespan * factor
    assert again.utilization == pytest.approx(shares)


def test_overlapping_actions_count_once():
    spans = [(0, 10), (1, 2), (5, 6), (19, 20)]
    assert Timeline(event(0, *span) for span in spans).utilization == {0: 11 / 20}


@fewer
@given(timelines)
def test_lanes_are_sorted_by_start(timeline: Timeline) -> None:
    on_lanes = [(worker, each) for worker, lane in timeline.lanes.items() for each in lane]
    workers = timeline.workers
    expected = [(workers.get(each.stage, each.stage), each) for each in timeline.events]
    assert sorted(map(repr, on_lanes)) == sorted(map(repr, expected))
    for lane in (timeline.events, *timeline.lanes.values()):
        assert [each.start for each in lane] == sorted(each.start for each in lane)


@fewer
@given(timelines)
def test_peak_is_maximum_over_actions(timeline: Timeline) -> None:
    known = [each for each in timeline.events if each.held_bytes is not None]
    stages = {each.stage for each in timeline.events}
    expected = {j: max((e.held_bytes or 0 for e in known if e.stage == j), default=0) for j in stages}
    assert timeline.peak_bytes == (expected if known else None)
    together = max((size for _, size in timeline.held(*stages)), default=0)
    assert max(expected.values(), default=0) <= together <= sum(expected.values())


@given(st.lists(events(), max_size=8), st.data())
def test_deferred_events_are_called_once(found: list[Event], data: st.DataObject) -> None:
    calls = []
    timeline = Timeline()
    for each in found:
        late = data.draw(st.booleans())
        timeline.add((lambda each=each: calls.append(each) or each) if late else each)
    assert calls == []
    assert timeline.events == Timeline(found).events
    assert timeline.events == Timeline(found).events
    assert len(calls) == len({id(each) for each in calls})


def test_threads_add_at_the_same_time() -> None:
    timeline, ready = Timeline(), threading.Barrier(4)

    def work(stage: int) -> None:
        ready.wait(300)
        for i in range(500):
            timeline.add(event(stage, i, i + 1, microbatch=i))

    threads = [threading.Thread(target=work, args=(stage,), daemon=True) for stage in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(timeline.events) <= 2000
    assert [len(lane) for lane in timeline.lanes.values()] == [500] * 4


def test_a_function_that_raises_loses_nothing() -> None:
    patience = iter([False, True])
    timeline = Timeline([event(0, 0, 1)])
    timeline.add(lambda: event(1, 1, 2) if next(patience) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _ = timeline.events
    assert timeline.events == (event(0, 0, 1), event(1, 1, 2))


@fewer
@given(timelines)
def test_table_sums_actions_of_each_worker(timeline: Timeline) -> None:
    head, _, *lines = str(timeline).splitlines()[1:] or ["", ""]
    for line, lane in zip(lines, timeline.lanes.values(), strict=True):
        columns = dict(zip(head.split()[3:], re.split(r"  +", line.strip())[3:], strict=True))
        held = timeline.held(*{each.stage for each in lane})
        assert columns["waiting"] == format_seconds(sum(each.wait for each in lane))
        assert columns["moved"] == format_bytes(sum(each.bytes_moved for each in lane))
        assert columns["peak"] == (format_bytes(max(size for _, size in held)) if held else "–")


def test_an_example_of_a_table() -> None:
    timeline = Timeline(
        [event(0, 0.0, 0.001, held_bytes=1536), event(1, 0.002, 0.004, wait=0.002, bytes_moved=2048)], {1: 1}
    )
    assert str(timeline).splitlines() == [
        "2 stages × 1 micro-batch in 4.00 ms, bubble 62.5 %",
        "worker  stages  device  forward  waiting     moved      peak    busy",
        "────────────────────────────────────────────────────────────────────",
        "0       0       cpu     1.00 ms      0 s       0 B  1.50 KiB  25.0 %",
        "1       1       cpu     2.00 ms  2.00 ms  2.00 KiB         –  50.0 %",
    ]

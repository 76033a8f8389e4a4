"""A process may be forked while other threads hold locks that the child will need."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from packages.streams.tests.fakes import in_child

from gpipe import Event, Timeline

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
]


@contextmanager
def over_and_over(work: Callable[[], object]) -> Iterator[None]:
    """Inside, another thread does ``work``, most of the time."""
    end, begun = threading.Event(), threading.Event()

    def run() -> None:
        while not end.is_set():
            work()
            begun.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert begun.wait(300)
        yield
    finally:
        end.set()
        thread.join(300)


def test_the_child_may_read_a_timeline_that_another_thread_was_reading() -> None:
    timeline = Timeline()

    def event() -> Event:
        torch.rand(100_000)
        return Event(0, 0, "forward", device="cpu", start=0, end=1)

    def read() -> None:
        for _ in range(10):
            timeline.add(event)
        assert timeline.events

    with over_and_over(read):
        assert [in_child(lambda: bool(timeline.events)) for _ in range(10)] == ["True"] * 10

"""A process may be forked while other threads hold locks that the child will need."""

import os
import threading

import pytest
import torch
from packages.streams.tests.fakes import in_child

from gpipe import Event, Timeline

from .layers import started

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
]


def test_forked_child_may_read_locked_timeline() -> None:
    timeline = Timeline()
    end, begun = threading.Event(), threading.Event()

    def event() -> Event:
        torch.rand(100_000)
        return Event(0, 0, "forward", device="cpu", start=0, end=1)

    def read() -> None:
        """Over and over, most of the time."""
        while not end.is_set():
            for _ in range(10):
                timeline.add(event)
            assert timeline.events
            begun.set()

    reading = started(read)
    assert begun.wait(300)
    try:
        assert [in_child(lambda: bool(timeline.events)) for _ in range(10)] == ["True"] * 10
    finally:
        end.set()
        reading.result(300)

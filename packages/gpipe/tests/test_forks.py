"""A process may be forked while other threads hold locks that the child will need."""

import os
import threading

import pytest
import torch
from packages.streams.tests.fakes import in_child
from packages.streams.tests.interleavings.interrupts import Interrupts

from gpipe import Event, Timeline

from .interleavings.interrupted import prepared
from .interleavings.processes import forks
from .layers import started
from .test_interrupts import FILES

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


def test_child_may_leave_a_step_of_a_model() -> None:
    """The threads of forwards do not exist in the child, so it must not wait for them."""
    options = None, "never", True, True, False
    counted, places = prepared(options), Interrupts(FILES)
    places.during(counted.step)
    counted.pipe.close()
    inside = [k for k, (code, _) in enumerate(places.places, 1) if code.co_name == "go_on"]
    for at in inside[len(inside) // 4 :: len(inside) // 3]:
        assert not forks(lambda: prepared(options), at)

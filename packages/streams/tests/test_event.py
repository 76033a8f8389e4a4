"""Events on a GPU; what they order on any accelerator is in test_accelerator."""

import pytest
import torch

from streams import CPUStream, new_stream, record_event, use_stream, wait_event

from .cuda import DEVICE, sleep, warm_up
from .test_wait import late_ones, seen_by


@pytest.mark.cuda
def test_a_stream_waits_for_an_event_and_not_for_what_came_after_it():
    warm_up()
    source, target = new_stream(DEVICE), new_stream(DEVICE)
    x, room = late_ones(target)
    event = record_event(target)
    with use_stream(target):
        for _ in range(10):
            sleep()
    wait_event(source, event)
    assert not event.query(), "the caller was held up"
    assert seen_by(source, x, room) == 1000
    assert not target.query(), "the source waited for what came after the event"
    target.synchronize()


@pytest.mark.cuda
def test_the_cpu_waits_for_an_event():
    warm_up()
    target = new_stream(DEVICE)
    late_ones(target)
    event = record_event(target)
    assert not event.query()
    wait_event(CPUStream, event)
    assert event.query()


@pytest.mark.cuda
def test_timed_events_tell_how_long_it_took():
    warm_up()
    stream = new_stream(DEVICE)
    start = record_event(stream, timed=True)
    with use_stream(stream):
        sleep()
    end = record_event(stream, timed=True)
    end.synchronize()
    assert start.elapsed_time(end) > 10
    assert start.device == torch.device("cuda", 0)

"""Streams on a GPU: every wait and every record is shown to have an effect."""

import pytest
import torch

from streams import (
    CPUStream,
    Task,
    current_stream,
    new_stream,
    record_event,
    record_stream,
    spawn_workers,
    use_stream,
    wait_event,
    wait_stream,
)

from .fakes import take

pytestmark = pytest.mark.cuda


DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cuda")
LONG = 200_000_000
"""Clock ticks: about a tenth of a second, very much longer than any launch."""


def sleep() -> None:
    """Keep the current stream busy for a while; returns at once."""
    torch.cuda._sleep(LONG)


def warm_up() -> None:
    """Load what a first launch loads, which may wait for the whole device and so hide a missing wait."""
    torch.cuda._sleep(1)
    x, y = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    torch.add(x.fill_(1), 1, out=y)
    x.copy_(y, non_blocking=True).cpu()
    torch.cuda.synchronize()


def late_ones(stream):
    """Zeros that turn to ones on ``stream``, long after this returns, and room to read them into.

    Everything is allocated before the stream is busy, since an allocation may synchronize the device and so hide a
    missing wait.
    """
    x, room = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    torch.cuda.synchronize()
    with use_stream(stream):
        sleep()
        x.fill_(1)
    return x, room


def seen_by(stream, x, room):
    """The sum of ``x`` as ``stream`` finds it now."""
    with use_stream(stream):
        room.copy_(x, non_blocking=True)
    stream.synchronize()
    return room.cpu().sum().item()


def test_without_a_wait_a_stream_overtakes_another():
    # The witness of the tests below: they could not fail if this did.
    warm_up()
    source, target = new_stream(DEVICE), new_stream(DEVICE)
    assert seen_by(source, *late_ones(target)) == 0
    target.synchronize()


def test_the_cpu_waits_for_a_cuda_stream():
    warm_up()
    target = new_stream(DEVICE)
    late_ones(target)
    assert not target.query()
    wait_stream(CPUStream, target)
    assert target.query()


@pytest.mark.parametrize("hops", [1, 4])
def test_a_value_handed_from_stream_to_stream_arrives(hops):
    warm_up()
    here, theirs = new_stream(DEVICE), [new_stream(DEVICE) for _ in range(hops)]
    rooms = [torch.zeros(1000, device=DEVICE) for _ in range(hops)]
    x, room = late_ones(here)
    for there, larger in zip(theirs, rooms, strict=True):
        wait_stream(there, here)
        with use_stream(there):
            torch.add(x, 1, out=larger)
        record_stream(x, there)
        here, x = there, larger
    assert seen_by(here, x, room) == 1000 * (hops + 1)


def test_wait_event_ignores_later_work():
    warm_up()
    source, target = new_stream(DEVICE), new_stream(DEVICE)
    x, room = late_ones(target)
    event = record_event(target)
    with use_stream(target):
        for _ in range(10):
            sleep()
    wait_event(source, event)
    assert not event.query(), "the call blocked the host"
    assert seen_by(source, x, room) == 1000
    assert not target.query(), "the source waited for work queued after the event"
    target.synchronize()


def reused(view, *, recorded):
    """Return whether the block of ``view`` is reused while a different stream is still busy."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reader = new_stream(DEVICE)
    x = torch.zeros(1024, device=DEVICE)
    address, seen = x.data_ptr(), view(x)
    with use_stream(reader):
        sleep()
    if recorded:
        record_stream(seen, reader)
    del x, seen
    y = torch.empty(1024, device=DEVICE)
    assert not reader.query(), "the reader was too fast to prove anything"
    torch.cuda.synchronize()
    return y.data_ptr() == address


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x[256:512], lambda x: x.view(32, 32).t()[3:], lambda x: x.view(torch.int32)[5:]]
)
def test_recorded_block_is_not_reused_while_read(view):
    warm_up()
    assert reused(view, recorded=False), "the allocator did not reuse the block anyway: this proves nothing"
    assert not reused(view, recorded=True)


def test_caller_waits_for_streams_of_two_workers():
    warm_up()
    here = current_stream(DEVICE)
    streams = [new_stream(DEVICE) for _ in range(2)]
    xs = [torch.zeros(1000, device=DEVICE) for _ in streams]
    torch.cuda.synchronize()
    with spawn_workers([DEVICE, DEVICE], shared=False) as (in_queues, out_queues):
        for stream, queue, x in zip(streams, in_queues, xs, strict=True):
            queue.put(
                Task(
                    stream,
                    compute=lambda x=x: (sleep(), x.fill_(1))[1],
                    finalize=lambda _, stream=stream: wait_stream(here, stream),
                )
            )
        for queue in out_queues:
            ok, (done, result) = take(queue)
            assert ok
            done.finalize(result)
    assert sum(x.sum() for x in xs).item() == 2000

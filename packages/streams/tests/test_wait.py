import pytest
import torch

from streams import CPUStream, current_stream, new_stream, record_stream, use_stream, wait_stream

from .cuda import DEVICE, sleep, warm_up


def test_the_cpu_waits_for_the_cpu_by_doing_nothing():
    wait_stream(CPUStream, CPUStream)


@pytest.mark.parametrize(("source", "target"), [(None, CPUStream), (CPUStream, "cuda")])
def test_what_is_no_stream_is_named(source, target):
    with pytest.raises(TypeError, match="stream must be CPUStream or"):
        wait_stream(source, target)


def late_ones(stream):
    """Zeros that turn to ones on ``stream``, long after this returns, and room to read them into.

    Everything is allocated before the stream is busy, since an allocation may wait for the device and so hide that
    nobody else did.
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


@pytest.mark.cuda
def test_without_a_wait_a_stream_overtakes_another():
    # The witness of the tests below: they could not fail if this did.
    warm_up()
    source, target = new_stream(DEVICE), new_stream(DEVICE)
    assert seen_by(source, *late_ones(target)) == 0
    target.synchronize()


@pytest.mark.cuda
def test_a_cuda_stream_waits_for_another_without_holding_up_the_caller():
    warm_up()
    source, target = new_stream(DEVICE), new_stream(DEVICE)
    x, room = late_ones(target)
    wait_stream(source, target)
    assert not target.query(), "the caller was held up"
    assert seen_by(source, x, room) == 1000


@pytest.mark.cuda
def test_the_current_stream_waits_too():
    warm_up()
    target = new_stream(DEVICE)
    x, room = late_ones(target)
    wait_stream(current_stream(DEVICE), target)
    assert seen_by(current_stream(DEVICE), x, room) == 1000


@pytest.mark.cuda
def test_the_cpu_waits_for_a_cuda_stream():
    warm_up()
    target = new_stream(DEVICE)
    late_ones(target)
    assert not target.query()
    wait_stream(CPUStream, target)
    assert target.query()


@pytest.mark.cuda
def test_a_copy_to_pinned_memory_is_there_after_the_cpu_waited():
    warm_up()
    stream = new_stream(DEVICE)
    y = torch.zeros(1000, pin_memory=True)
    x, _ = late_ones(stream)
    with use_stream(stream):
        y.copy_(x, non_blocking=True)
    assert y.sum().item() == 0
    wait_stream(CPUStream, stream)
    assert y.sum().item() == 1000


@pytest.mark.cuda
def test_a_cuda_stream_does_not_wait_for_the_cpu():
    wait_stream(new_stream(DEVICE), CPUStream)


@pytest.mark.cuda
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

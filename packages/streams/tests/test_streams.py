"""The vocabulary of streams on the CPU, and on every type of accelerator by stand-ins that know what waits for what."""

import threading
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streams import (
    CPUStream,
    CPUStreamType,
    Task,
    as_cuda,
    current_stream,
    default_stream,
    get_device,
    has_streams,
    is_accelerator,
    is_cuda,
    new_stream,
    record_event,
    record_stream,
    spawn_workers,
    use_device,
    use_stream,
    wait_event,
    wait_stream,
)

from .accelerator import KINDS, accelerator
from .fakes import PATIENCE, FakeDevice, in_thread, submit, take, wait

each_kind = pytest.mark.parametrize("kind", KINDS, ids=[f"fake-{kind}" for kind in KINDS])
GIVERS = [new_stream, current_stream, default_stream]
PLAIN = [torch.device("cpu"), torch.device("cpu", 3), torch.device("meta"), torch.device("xla", 0), FakeDevice()]
"""Devices without streams, whatever the accelerator."""
PLACES = st.tuples(st.integers(0, 2), st.integers(0, 3))
"""The index of a device, and the number of a stream of it."""


@pytest.mark.parametrize("kind", [None, *KINDS], ids="fake-{}".format)
def test_device_without_streams_uses_placeholder(kind):
    with accelerator(kind) if kind else ExitStack():
        for device in PLAIN:
            assert not has_streams(device)
            assert [give(device) for give in GIVERS] == [CPUStream] * 3
            with use_device(device), use_device(device), use_stream(CPUStream), use_stream(CPUStream):
                assert current_stream(device) is CPUStream
    assert is_accelerator(CPUStream) is False
    assert is_cuda(CPUStream) is False
    assert get_device(CPUStream) == torch.device("cpu")
    assert record_event(CPUStream) is None
    wait_event(CPUStream, None)
    wait_stream(CPUStream, CPUStream)
    record_stream(torch.ones(2), CPUStream)


@pytest.mark.parametrize("junk", ["cuda", 0, None])
@pytest.mark.parametrize("use", [*GIVERS, has_streams, use_device])
def test_what_is_no_device_is_named(use, junk):
    with pytest.raises(TypeError, match=r"device must have a \.type.*wrap names and numbers in torch\.device"):
        use(junk)


@pytest.mark.parametrize("use", [*GIVERS, use_device])
def test_a_device_that_is_not_there_is_named(use):
    with pytest.raises(ValueError, match=r"cuda:99, but torch sees \d+ CUDA devices"):
        use(torch.device("cuda", 99))
    for kind in KINDS:
        with (
            accelerator(kind, devices=3),
            pytest.raises(ValueError, match=rf"{kind}:3, but torch sees 3 {kind.upper()}"),
        ):
            use(torch.device(kind, 3))


def test_cuda_with_foreign_accelerator_raises():
    with accelerator("privateuseone"), pytest.raises(ValueError, match=r"cuda:0, .* torch.accelerator is 'private"):
        new_stream(torch.device("cuda", 0))


@pytest.mark.parametrize("junk", [None, "cuda", CPUStreamType, torch.device("cpu")])
@pytest.mark.parametrize(
    "use",
    [
        *(is_accelerator, is_cuda, as_cuda, get_device, use_stream, record_event),
        lambda junk: wait_event(junk, None),
        lambda junk: wait_event(junk, object()),
        lambda junk: wait_stream(junk, CPUStream),
        lambda junk: wait_stream(CPUStream, junk),
        lambda junk: record_stream(torch.ones(1), junk),
        lambda junk: Task(junk, compute=int),
    ],
)
def test_what_is_no_stream_is_named(use, junk):
    with pytest.raises(TypeError, match=r"stream must be CPUStream or a torch\.Stream"):
        use(junk)


@pytest.mark.parametrize("junk", [None, (torch.ones(1),), 3])
def test_what_is_no_tensor_is_named(junk):
    with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor; got"):
        record_stream(junk, CPUStream)


@each_kind
def test_streams_of_an_accelerator(kind):
    with accelerator(kind) as fake:
        device = torch.device(kind, 2)
        stream = new_stream(device)
        assert has_streams(device)
        assert is_accelerator(stream)
        assert get_device(stream) == device
        assert current_stream(device) is default_stream(device) is not stream
        fake.set_stream(fake.stream(2, 3))
        assert current_stream(device) is fake.stream(2, 3)
        assert default_stream(device) is fake.stream(2, 0)
        assert is_cuda(stream) == (kind == "cuda")
        if kind == "cuda":
            assert as_cuda(stream) is stream
        else:
            with pytest.raises(TypeError, match=r"must be a torch\.cuda\.Stream here"):
                as_cuda(stream)
        with use_device(torch.device(kind, 1)):
            for give in GIVERS:
                assert get_device(give(torch.device(kind))) == torch.device(kind, 1)
    with pytest.raises(TypeError, match=r"must be a torch\.cuda\.Stream here; got CPUStream"):
        as_cuda(CPUStream)


@each_kind
@given(st.lists(PLACES, min_size=1, max_size=5), PLACES)
def test_block_restores_device_and_streams(kind, nested, before):
    """Property: inside, the innermost stream and its device are current; after each block, what was before it."""

    def state():
        return fake.index, [fake.current_stream(torch.device(kind, index)) for index in range(fake.devices)]

    def visit(places):
        if not places:
            raise ZeroDivisionError
        found, stream = state(), fake.stream(*places[0])
        try:
            with use_stream(stream):
                assert current_stream(stream.device) is stream
                assert fake.index == places[0][0]
                visit(places[1:])
        finally:
            assert state() == found

    with accelerator(kind) as fake:
        fake.set_stream(fake.stream(*before))
        fake.set_device_index(before[0])
        with pytest.raises(ZeroDivisionError):
            visit(nested)


@each_kind
def test_threads_may_share_a_stream(kind):
    """Two threads enter one stream in turn and leave it in turn; each gets back what it had."""
    with accelerator(kind) as fake:
        stream, own = fake.stream(1, 1), fake.stream(2, 2)
        entered, left = threading.Event(), threading.Event()

        def other():
            fake.set_device_index(2)
            fake.set_stream(own)
            with use_stream(stream):
                entered.set()
                wait(left)
            return fake.index, fake.current_stream(own.device), fake.current_stream(stream.device)

        with spawn_workers([torch.device("cpu")]) as ([in_queue], _):
            with use_stream(stream):
                found = submit(in_queue, other)
                wait(entered)
            assert (fake.index, fake.current_stream(stream.device)) == (0, fake.stream(1, 0))
            left.set()
            assert found.result(PATIENCE) == (2, own, fake.stream(1, 0))


@each_kind
@given(st.lists(st.tuples(PLACES, PLACES, st.booleans()), max_size=12))
def test_wait_orders_earlier_work(kind, steps):
    """Property: after waiting for a stream or event, the source follows the target and its history."""
    with accelerator(kind) as fake:
        for a, b, by_event in steps:
            source, target = fake.stream(*a), fake.stream(*b)
            target.work()
            known = [s for s in fake.streams.values() if target.comes_after(s)]
            if by_event:
                event = record_event(target)
                assert not event.timed
                wait_event(source, event)
            else:
                wait_stream(source, target)
            assert all(source.comes_after(stream) for stream in [*known, target])
            assert not target.synchronised


@each_kind
def test_event_covers_earlier_work_only(kind):
    with accelerator(kind) as fake:
        source, target = fake.stream(0, 1), fake.stream(1, 1)
        event = record_event(target, timed=True)
        assert event.timed
        target.work()
        wait_event(source, event)
        assert not source.comes_after(target)
        wait_event(CPUStream, event)
        assert event.synchronised
        assert not target.synchronised
        wait_stream(CPUStream, target)
        assert target.synchronised
        seen = dict(source.seen)
        wait_stream(source, CPUStream)
        wait_event(source, record_event(CPUStream))
        assert source.seen == seen


@each_kind
def test_only_accelerator_tensors_are_recorded(kind):
    class Remembers(torch.Tensor):
        @property
        def device(self):
            return torch.device(self.place)

        def record_stream(self, stream):
            recorded.append(stream)

    recorded = []
    with accelerator(kind) as fake:
        stream = fake.stream(0, 1)
        for place in ("cpu", kind):
            tensor = torch.ones(1).as_subclass(Remembers)
            tensor.place = place
            record_stream(tensor, stream)
            record_stream(tensor, CPUStream)
    # MPS has one stream only.
    assert recorded == ([] if kind == "mps" else [stream])


def test_parts_of_sparse_tensor_are_recorded():
    """torch cannot record the sparse tensor itself."""
    recorded = []
    with accelerator("meta") as fake, mock.patch.object(torch.Tensor, "record_stream", lambda x, _: recorded.append(x)):
        record_stream(torch.eye(2).to_sparse().to("meta"), fake.stream(0, 1))
    assert [part.layout for part in recorded] == [torch.strided] * 2


@each_kind
def test_task_runs_on_its_stream(kind):
    with accelerator(kind) as fake:
        stream, seen = fake.stream(1, 1), []

        def look(*_):
            seen.append((fake.index, current_stream(stream.device)))

        with spawn_workers([torch.device(kind), torch.device(kind, 0), torch.device(kind, 1)]) as (ins, outs):
            assert ins[0] is ins[1] is not ins[2]
            ins[2].put(Task(stream, compute=look, finalize=look))
            ok, (task, result) = take(outs[2])
            assert ok
            task.finalize(result)
            # The device of a worker is current even without a stream.
            assert submit(ins[2], lambda: fake.index).result(PATIENCE) == 1
        assert seen == [(1, stream)] * 2
        assert in_thread(lambda: fake.index) == 0

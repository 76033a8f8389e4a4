"""The vocabulary on every type of accelerator, on stand-ins that know what waits for what."""

import threading
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streams import (
    CPUStream,
    Task,
    as_accelerator,
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

from .accelerator import KINDS, FakeStream, accelerator
from .fakes import PATIENCE, in_thread, take, wait

each_kind = pytest.mark.parametrize("kind", KINDS, ids=[f"fake-{kind}" for kind in KINDS])


@each_kind
def test_streams_of_an_accelerator(kind):
    with accelerator(kind):
        device = torch.device(kind, 2)
        stream = new_stream(device)
        assert has_streams(device)
        assert is_accelerator(stream)
        assert as_accelerator(stream) is stream
        assert get_device(stream) == device
        assert current_stream(device) is default_stream(device) is not stream
        assert is_cuda(stream) == (kind == "cuda")


@each_kind
def test_a_device_without_an_index_is_the_current_one(kind):
    with accelerator(kind), use_device(torch.device(kind, 1)):
        for give in (new_stream, current_stream, default_stream):
            assert get_device(give(torch.device(kind))) == torch.device(kind, 1)


def test_only_cuda_streams_are_cuda_streams():
    with accelerator("xpu"):
        stream = new_stream(torch.device("xpu", 0))
        with pytest.raises(TypeError, match=r"must be a torch\.cuda\.Stream here"):
            as_cuda(stream)
    with pytest.raises(TypeError, match=r"must be a torch\.Stream here; got CPUStream"):
        as_accelerator(CPUStream)


@each_kind
def test_whatever_is_not_the_accelerator_has_the_placeholder(kind):
    with accelerator(kind):
        for device in (torch.device("cpu"), torch.device("meta"), torch.device("xla", 0)):
            assert not has_streams(device)
            assert new_stream(device) is current_stream(device) is default_stream(device) is CPUStream


@each_kind
def test_a_device_that_is_not_there_is_named(kind):
    with accelerator(kind, devices=3):
        for use in (new_stream, current_stream, default_stream, use_device):
            with pytest.raises(ValueError, match=rf"{kind}:3, but torch sees 3 {kind.upper()} devices"):
                use(torch.device(kind, 3))


def test_cuda_beside_another_accelerator_is_refused_since_nothing_could_order_it():
    with accelerator("privateuseone"), pytest.raises(ValueError, match=r"cuda:0, .* torch.accelerator is 'private"):
        new_stream(torch.device("cuda", 0))


places = st.tuples(st.integers(0, 2), st.integers(0, 3))
"""The index of a device, and the number of a stream of it."""


@each_kind
@given(st.lists(places, min_size=1, max_size=5), places)
def test_a_block_leaves_device_and_streams_as_they_were(kind, nested, before):
    """Property: inside, the innermost stream and its device are current; after each block, what was before it."""
    with accelerator(kind) as fake:
        fake.set_stream(fake.stream(*before))
        fake.set_device_index(before[0])
        found = [_state(fake)]
        with ExitStack() as blocks:
            for place in nested:
                stream = fake.stream(*place)
                blocks.enter_context(use_stream(stream))
                assert current_stream(stream.device) is stream
                assert fake.index == place[0]
                found.append(_state(fake))
            for _ in nested:
                assert _state(fake) == found.pop()
                blocks._exit_callbacks.pop()[1](None, None, None)
            assert _state(fake) == found.pop()


def _state(fake):
    return fake.index, [fake.current_stream(torch.device(fake.kind, index)) for index in range(fake.devices)]


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

        answer = []
        thread = threading.Thread(target=lambda: answer.append(other()), daemon=True)
        with use_stream(stream):
            thread.start()
            wait(entered)
        assert fake.index == 0
        assert fake.current_stream(stream.device).number == 0
        left.set()
        thread.join(PATIENCE)
        assert answer == [(2, own, fake.stream(1, 0))]


@each_kind
def test_what_is_raised_inside_a_stream_passes(kind):
    with accelerator(kind) as fake:
        with pytest.raises(ZeroDivisionError), use_stream(fake.stream(1, 1)):
            raise ZeroDivisionError
        assert fake.index == 0


@each_kind
@given(st.lists(st.tuples(places, places, st.booleans()), max_size=12))
def test_a_wait_orders_all_that_was_queued_before_it(kind, steps):
    """Property: after a wait, or the wait for an event, the source comes after the target, and whatever that had."""
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


@each_kind
def test_what_is_queued_after_an_event_is_not_waited_for(kind):
    with accelerator(kind) as fake:
        source, target = fake.stream(0, 1), fake.stream(1, 1)
        event = record_event(target)
        target.work()
        wait_event(source, event)
        assert not source.comes_after(target)


@each_kind
def test_the_cpu_itself_waits_for_a_stream_and_for_an_event_and_nobody_for_the_cpu(kind):
    with accelerator(kind) as fake:
        stream = fake.stream(0, 1)
        event = record_event(stream, timed=True)
        assert event.timed
        wait_event(CPUStream, event)
        assert event.synchronised
        assert not stream.synchronised
        wait_stream(CPUStream, stream)
        assert stream.synchronised
        wait_stream(stream, CPUStream)
        wait_event(stream, record_event(CPUStream))
        assert stream.seen == {}


@pytest.mark.parametrize("event", [None, object()])
def test_what_is_no_stream_is_named_where_an_event_is(event):
    for call in (lambda: record_event(None), lambda: wait_event(None, event)):
        with pytest.raises(TypeError, match="stream must be CPUStream or"):
            call()


@each_kind
def test_a_tensor_is_recorded_where_its_memory_is_the_accelerator_s(kind):
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


@each_kind
def test_equal_spellings_of_a_device_share_a_worker_and_tasks_run_on_their_stream(kind):
    with accelerator(kind) as fake:
        stream = fake.stream(1, 1)
        with spawn_workers([torch.device(kind), torch.device(kind, 0), torch.device(kind, 1)]) as (ins, outs):
            assert ins[0] is ins[1] is not ins[2]
            ins[2].put(Task(stream, compute=lambda: (fake.index, current_stream(stream.device))))
            ok, (_, found) = take(outs[2])
        assert ok
        assert found == (1, stream)
        assert in_thread(lambda: fake.index) == 0
        assert isinstance(stream, FakeStream)

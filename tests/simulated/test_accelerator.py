"""The simulator itself: races that it must find, and orders that it must accept."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from streams import CPUStream, record_event, record_stream, use_stream, wait_event, wait_stream

from .accelerator import Queue, device, found, library, new_stream, used, using
from .communicators import Communicator
from .races import HERE, ROOT, Race


def texts() -> list[str]:
    return sorted({race.text for race in found()})


def ones(k: int = 0) -> Tensor:
    return torch.ones(4, 4, device=device(k))


class TestOrder:
    def test_a_stream_is_in_order_by_itself(self):
        with use_stream(new_stream(0)):
            ones().mul_(2).add_(1).sum().item()
        assert texts() == []

    def test_reading_on_another_stream(self):
        first, second = new_stream(0), new_stream(0)
        with use_stream(first):
            x = ones()
        with use_stream(second):
            y = x @ x
        (race,) = found()
        assert race.text.startswith("READ by mm on dev0/s")
        assert "not ordered after fill_ on dev0/s" in race.text
        assert "test_accelerator.py" in race.line
        assert race.line.endswith("test_reading_on_another_stream")
        del x, y
        assert texts() == []  # the host has waited for both

    def test_writing_what_another_stream_reads(self):
        first, second = new_stream(0), new_stream(0)
        x = ones()
        wait_stream(first, torch.accelerator.current_stream(device(0)))
        wait_stream(second, torch.accelerator.current_stream(device(0)))
        with use_stream(first):
            y = x * 2
        with use_stream(second):
            x.zero_()
        assert [race.text.split(" on ")[0] for race in found()] == ["WRITE by zero_"]
        assert y.sum().item() == 32

    @pytest.mark.parametrize("how", ["wait_stream", "event", "synchronise the stream", "synchronise the device"])
    def test_waits_that_order(self, how: str):
        first, second = new_stream(0), new_stream(0)
        with use_stream(first):
            x = ones()
            event = record_event(first)
        {
            "wait_stream": lambda: wait_stream(second, first),
            "event": lambda: wait_event(second, event),
            "synchronise the stream": lambda: wait_stream(CPUStream, first),
            "synchronise the device": lambda: torch.accelerator.synchronize(device(0)),
        }[how]()
        with use_stream(second):
            (x @ x).sum().item()
        assert texts() == []

    def test_an_event_orders_only_what_came_before_it(self):
        first, second = new_stream(0), new_stream(0)
        with use_stream(first):
            x = ones()
            event = record_event(first)
            x.mul_(2)
        wait_event(second, event)
        with use_stream(second):
            x.sum().item()
        assert ["not ordered after mul on" in text for text in texts()] == [True]


class TestEvents:
    def test_one_is_ready_once_the_host_has_waited(self):
        stream = torch.accelerator.current_stream(device(0))
        start = record_event(stream, timed=True)
        ones().mul_(2)
        end = record_event(stream, timed=True)
        assert not end.query()
        assert not stream.query()
        with pytest.raises(RuntimeError, match="completed"):
            start.elapsed_time(end)
        end.synchronize()
        assert start.query()
        assert start.elapsed_time(end) > 0

    @pytest.mark.parametrize(
        "ask", [Tensor.item, Tensor.nonzero, torch.unique, lambda x: x.equal(x), lambda x: x[x > 0]]
    )
    def test_the_host_waits_for_what_python_or_a_size_needs(self, ask: Callable[[Tensor], object]):
        x = ones()[0, :1]
        library().take_counters()
        ask(x)
        assert library().take_counters()["synchronisations"] > 0


class TestThreads:
    def read(self, stream: torch.Stream, queue: SimpleQueue[Tensor]) -> Thread:
        """Have a copy on its way to the host, for which this thread waits, read by another one."""
        reader = Thread(target=lambda: queue.get().sum())
        there = (ones() * 2).to("cpu", non_blocking=True)
        stream.synchronize()
        queue.put(there)
        reader.start()
        return reader

    @pytest.mark.parametrize(("kind", "races"), [(SimpleQueue, ["READ by sum on the host"]), (Queue, [])])
    def test_who_takes_from_a_queue_of_the_library_knows_what_was_waited_for(self, kind: type, races: list[str]):
        with use_stream(new_stream(0)):
            self.read(torch.accelerator.current_stream(device(0)), kind()).join()
        assert [text.split(" not ordered after copy D2H")[0] for text in texts()] == races

    def test_threads_of_autograd_know_what_their_caller_does(self):
        """And their caller what they waited for, in the backward of a function."""
        x, events = ones().requires_grad_(), []

        class Waits(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                events.append((current_thread(), event.query(), record_event(new_stream(0))))
                events[0][-1].synchronize()
                return gradient

        y = Waits.apply(x)
        event = record_event(torch.accelerator.current_stream(device(0)))
        event.synchronize()
        y.sum().backward()
        ((thread, known, inside),) = events
        assert thread is not current_thread()
        assert known
        assert inside.query()


class TestPools:
    @pytest.mark.parametrize(("priority", "other"), [(0, -1), (-1, 0)])
    def test_of_each_priority_there_are_32_streams_for_everybody(self, priority: int, other: int):
        streams = [new_stream(1, priority) for _ in range(33)]
        assert len({*streams[:32]}) == 32
        assert streams[32] == streams[0]
        assert new_stream(1, other) not in streams
        assert new_stream(2, priority) not in streams

    def test_a_process_group_has_a_stream_of_the_pool_and_its_work_holds_what_it_sends_until_it_is_polled(self):
        before, sent = used(), ones()
        group = Communicator(dist.HashStore(), 0, 1)
        work = group.send([sent], 0, 0)
        del sent
        assert {*group.streams.values()} < {new_stream(0) for _ in range(32)}
        assert used() > before
        work.wait()
        assert used() == before


class TestCopies:
    def test_between_devices_both_current_streams_are_in_order(self):
        with using([new_stream(0), new_stream(1)]):
            x = ones(0)
            y = x.to(device(1)) * 2
            x.zero_()
            y.sum().item()
        assert texts() == []

    def test_other_streams_are_not(self):
        x = ones(0)
        with using([new_stream(0), new_stream(1)]):
            y = x.to(device(1))
        with use_stream(new_stream(2)):
            y.to(device(2)).sum()
        assert any("not ordered after copy D2D" in text for text in texts())

    def test_a_copy_to_the_host_waits_unless_asked_not_to(self):
        assert float((ones() * 2).cpu().sum()) == 32
        assert texts() == []
        assert float((ones() * 2).to("cpu", non_blocking=True).sum()) == 32
        assert [text.split(" not ordered after copy D2H")[0] for text in texts()] == ["READ by sum on the host"]

    def test_the_host_reads_after_the_event(self):
        there = (ones() * 2).to("cpu", non_blocking=True)
        record_event(torch.accelerator.current_stream(device(0))).synchronize()
        assert float(there.sum()) == 32
        assert texts() == []

    def test_pinned_memory_may_not_change_before_it_is_read(self):
        host = torch.ones(4).pin_memory()
        assert host.is_pinned()
        there = host.to(device(0), non_blocking=True)
        host.zero_()
        assert [text.split(" not ordered after READ by copy H2D")[0] for text in texts()] == [
            "WRITE by zero_ on the host"
        ]
        host.fill_(2)
        del there
        assert texts() == []


class TestFreedMemory:
    def use_elsewhere(self, before_free: Callable[[Tensor, torch.Stream], object]) -> list[str]:
        """Read memory of the default stream on another one, and free it."""
        x, stream = ones(), new_stream(0)
        with use_stream(stream):
            y = x * 2
        before_free(x, stream)
        del x
        freed = texts()
        del y
        return freed

    def test_while_another_stream_reads_it(self):
        assert ["FREE of memory of dev0/s0" in text for text in self.use_elsewhere(lambda x, s: None)] == [True]

    def test_recorded(self):
        assert self.use_elsewhere(record_stream) == []

    def test_the_next_owner_of_an_address_begins_anew(self):
        stream = new_stream(0)
        for _ in range(50):
            with use_stream(stream):
                x = torch.ones(1000, device=device(0))
            wait_stream(torch.accelerator.current_stream(device(0)), stream)
            record_stream(x, torch.accelerator.current_stream(device(0)))
            x.sum()
            del x
            ones().sum()
        assert texts() == []


class TestAutograd:
    def test_a_backward_runs_on_the_streams_of_its_forward(self):
        stream = new_stream(0)
        with use_stream(stream):
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device(0))
            model(ones()).sum().backward()
            sum(p.grad.sum() for p in model.parameters()).item()
        assert texts() == []

    def test_gradients_are_the_caller_s_when_backward_returns(self):
        x = ones().requires_grad_()
        stream = new_stream(0)
        with use_stream(stream):
            loss = (x * 2).tanh().sum()
        back = new_stream(0)
        wait_stream(back, stream)
        with use_stream(back):
            loss.backward()
            x.grad.sum().item()
        assert texts() == []


def test_a_hang_ends_with_the_stacks_of_all_threads():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "10", HERE / "hanging.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert re.search(r", in test_hangs\n", done.stdout)
    assert re.search(r", in wait_for_ever\n", done.stdout)


def test_a_race_says_what_and_where():
    assert str(Race("READ by mm on dev0/s1 not ordered after copy H2D on dev0/s2", "x.py:3 in f")) == (
        "READ by mm on dev0/s1 not ordered after copy H2D on dev0/s2\n    at x.py:3 in f"
    )

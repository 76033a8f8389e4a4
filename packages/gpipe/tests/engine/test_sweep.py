"""Workers free what they made and others have dropped, also where references are counted by thread."""

from __future__ import annotations

import threading
import weakref
from contextlib import closing

import pytest
import torch

from gpipe.engine import _run
from gpipe.engine._sweep import Sweep
from gpipe.engine._workers import Workers
from streams import CPUStream, InQueue, Task, spawn_workers

from ..layers import linears, piped, rows

CPU = torch.device("cpu")


class Noted(Sweep):
    """Remembers which threads it has been on."""

    def __init__(self, in_queues: list[InQueue]) -> None:
        super().__init__(in_queues)
        self.threads: list[int] = []

    def __call__(self) -> None:
        self.threads.append(threading.get_ident())
        super().__call__()


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_each_worker_is_woken_and_its_neighbours_after_it(workers: int):
    with spawn_workers([CPU] * workers, shared=False) as (in_queues, out_queues):
        for queue in in_queues:
            queue.put(Task(CPUStream, compute=threading.get_ident))
        own = [queue.get()[1][1] for queue in out_queues]
        sweep = Noted(in_queues)
        sweep()
        assert sweep.done.wait(300)
    assert sweep.threads == [threading.get_ident(), *reversed(own), *own[1:]]


def test_what_a_worker_made_is_freed_although_it_waits():
    """Made by one worker, held by an object that another one made, and dropped by neither."""

    class Thing:
        def __init__(self, inner: object = None) -> None:
            self.inner = inner

    with spawn_workers([CPU] * 2, shared=False) as (in_queues, out_queues):

        def made(worker: int, inner: object) -> Thing:
            in_queues[worker].put(Task(CPUStream, compute=lambda: Thing(inner)))
            thing: Thing = out_queues[worker].get()[1][1]
            return thing

        for first in (0, 1):
            thing = made(1 - first, made(first, None))
            refs = [weakref.ref(thing), weakref.ref(thing.inner)]
            del thing
            sweep = Sweep(in_queues)
            sweep()
            assert sweep.done.wait(300)
            assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("free_threaded", [True, False])
def test_a_run_that_nobody_holds_is_swept_where_that_is_needed(free_threaded: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(_run.Run, "__del__", raising=False)
    if free_threaded:
        monkeypatch.setattr(_run.Run, "__del__", _run.Run._sweep, raising=False)
    swept: list[object] = []
    monkeypatch.setattr(Workers, "sweep", lambda workers: swept.append(workers))
    with closing(piped(linears(), [1, 2], chunks=2)) as pipe:
        pipe.step(rows(), loss_fn=lambda output, _: output.square().mean())
        assert len(swept) == free_threaded
        output = pipe(rows())
        assert len(swept) == free_threaded
        output.sum().backward()
        assert len(swept) == 2 * free_threaded
        del output
        pipe(rows())
        assert len(swept) == 3 * free_threaded

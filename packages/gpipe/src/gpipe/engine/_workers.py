"""The threads of a pipe: started by its first run, kept for later runs, and ended with the pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from streams import (
    AbstractStream,
    Context,
    CPUStream,
    InQueue,
    OutQueue,
    Task,
    limit_threads,
    pause_helpers,
    spawn_workers,
    use_stream,
)

from ._cores import Cores, bind, shares, usable
from ._run_lock import RunLock

Result = TypeVar("Result")
Work = tuple[AbstractStream, Callable[[], Result]]


def placement(devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Return the worker of each stage: one per CUDA device and numbered CPU, and one per stage on the plain CPU.

    >>> placement([torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda", 0), torch.device("cpu")])
    (0, 1, 0, 2)
    >>> placement([torch.device("cpu", 0), torch.device("cpu", 1), torch.device("cpu", 0), torch.device("cpu", 1)])
    (0, 1, 0, 1)
    """
    workers: dict[object, int] = {}
    keys = [(j if device == torch.device("cpu") else device) for j, device in enumerate(devices)]
    return tuple(workers.setdefault(key, len(workers)) for key in keys)


class Workers:
    """The threads for stages on ``devices``. Each does its work and waits for more.

    They are kept between runs, because a new thread is slow at first and grows its own memory arena. They end when this
    object is freed; a run in progress refers to it.
    """

    placement: tuple[int, ...]
    """The worker of each stage."""

    run_lock: RunLock
    """Held during a run, because workers do only one run at a time."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.placement = placement(devices)
        first = [self.placement.index(worker) for worker in range(len(set(self.placement)))]
        self._devices = [devices[j] for j in first]
        self._are_on_cpu = any(device.type == "cpu" for device in self._devices)
        self.run_lock = RunLock()
        self._scope: ExitStack | None = None
        self._process = 0
        self._divided: tuple[int, Cores] | None = None
        self._queues: tuple[list[InQueue], list[OutQueue]] = ([], [])

    def run(self, works: Sequence[Work[Result]], stop: Callable[[], None]) -> list[Result]:
        """Do each work on its worker, under its stream; return the results.

        A work must not raise. If the caller is interrupted while it waits, ``stop`` must make every work return soon.
        Then the workers are ended, and the interrupt is raised.
        """
        in_queues, out_queues = self._open()
        # Until all answers are taken, so that the next run begins with new workers even if an interrupt arrives while
        # this one handles another.
        scope, self._scope = self._scope, None
        assert scope is not None
        try:
            self._share_processor(in_queues, out_queues)
            if self._are_on_cpu:
                pause_helpers()  # they would spin on the cores that the workers need
            for queue, (stream, compute) in zip(in_queues, works, strict=True):
                queue.put(_Work(stream, compute, stop))
            # Take all answers, even after a failure: the next run would mistake a remaining one for its own.
            results = [_result(queue.get()) for queue in out_queues]
        except BaseException:
            try:
                stop()
            finally:
                # Again after an interrupt, because workers that wait for each other would never end. The workers are
                # ended even after an interrupt here, because they must not compute while the next run does.
                try:
                    stop()
                finally:
                    scope.close()
            raise
        self._scope = scope
        return results

    def close(self) -> None:
        """End the threads, which must be idle. The next run starts new ones."""
        scope, self._scope = self._scope, None
        # A forked child has no threads to join.
        if scope is not None and self._process == os.getpid():
            scope.close()

    def _open(self) -> tuple[list[InQueue], list[OutQueue]]:
        # A forked child does not inherit the threads.
        if self._scope is None or self._process != os.getpid():
            scope = ExitStack()
            self._queues = scope.enter_context(spawn_workers(self._devices, shared=False, context=Context.plain()))
            self._scope, self._process, self._divided = scope, os.getpid(), None
        return self._queues

    def _share_processor(self, in_queues: Sequence[InQueue], out_queues: Sequence[OutQueue]) -> None:
        """Divide the caller's cores and intra-op threads among the CPU workers."""
        available = (torch.get_num_threads(), usable())
        if available == self._divided:
            return
        threads, cores = available
        on_cpu = [j for j, device in enumerate(self._devices) if device.type == "cpu"]
        share = max(1, threads // max(1, len(on_cpu)))
        for j, own in zip(on_cpu, shares(cores, len(on_cpu)), strict=True):
            in_queues[j].put(Task(CPUStream, compute=partial(_settle, share, own, cores)))
        # After all requests were sent, because each worker takes time to start its helper threads.
        for j in on_cpu:
            _result(out_queues[j].get())
        self._divided = available


class _Work(Task[Result]):
    """A work as executed by a worker. It refers to no part of the run once the worker answers."""

    __slots__ = ("_stop",)

    def __init__(self, stream: AbstractStream, compute: Callable[[], Result], stop: Callable[[], None]) -> None:
        super().__init__(stream, compute=compute)
        self._stop = stop

    def compute(self) -> Result:
        compute, stop = self._compute, self._stop
        del self._compute, self._stop
        try:
            with use_stream(self.stream):
                return compute()
        except BaseException:
            stop()  # other workers may be waiting for this one
            raise


def _settle(threads: int, own: Cores, cores: Cores) -> None:
    """Give the calling worker ``threads`` intra-op threads, on its ``own`` of the ``cores``."""
    bind(own, cores)
    limit_threads(threads)


def _result(answer: Any) -> Any:
    succeeded, payload = answer
    if succeeded:
        return payload[1]
    if payload is None:
        raise RuntimeError("a worker of the pipe has ended while the pipe was running")
    error = payload[1]
    try:
        raise error
    finally:
        del error, payload, answer  # the error's traceback refers to this frame

"""The threads of a pipe: opened at the first run, kept for the next ones, gone with the pipe."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from streams import AbstractStream, Context, CPUStream, InQueue, OutQueue, Task, limit_threads, spawn_workers

Result = TypeVar("Result")
Work = tuple[AbstractStream, Callable[[], Result]]


_current = threading.local()


def placement(devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Which worker runs each stage: one for each CUDA device, and on the CPU one for each stage.

    Numbered CPUs are one CPU; stages on the same number share a worker, as stages on a CUDA device do.

    >>> placement([torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda", 0), torch.device("cpu")])
    (0, 1, 0, 2)
    >>> placement([torch.device("cpu", 0), torch.device("cpu", 1), torch.device("cpu", 0), torch.device("cpu", 1)])
    (0, 1, 0, 1)
    """
    workers: dict[object, int] = {}
    keys = [(j if device == torch.device("cpu") else device) for j, device in enumerate(devices)]
    return tuple(workers.setdefault(key, len(workers)) for key in keys)


class Workers:
    """The threads for stages on ``devices``. Each does what it is given and waits for more.

    Keeping them matters: a fresh thread pays for its start, its first small tensors and the growth of a memory arena of
    its own, again in every run.
    """

    placement: tuple[int, ...]
    """Which of them runs each stage."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.placement = placement(devices)
        first = [self.placement.index(worker) for worker in range(len(set(self.placement)))]
        self._devices = [devices[j] for j in first]
        self._lock = threading.Lock()
        self._scope: ExitStack | None = None
        self._process = 0
        self._share = 0
        self._queues: tuple[list[InQueue], list[OutQueue]] = ([], [])

    @classmethod
    def for_owner(cls, owner: object, devices: Sequence[torch.device]) -> Workers:
        """Workers for stages on ``devices``, which close when ``owner`` is garbage; the interpreter exits without."""
        opened = cls(devices)
        weakref.finalize(owner, opened.close).atexit = False
        return opened

    def run(self, works: Sequence[Work[Result]], stop: Callable[[], None]) -> list[Result]:
        """Do each work on its worker, under its stream; what they return, once all have.

        A work must not raise. If the caller is interrupted while it waits, ``stop`` is called, which must make every
        work return soon, and the workers are closed before the interrupt goes on.
        """
        if getattr(_current, "workers", None) is self:
            raise RuntimeError(
                "this pipe was called from one of its own workers, which would wait for itself for ever; a layer "
                "cannot call its pipe, and torch.utils.checkpoint around a pipe needs use_reentrant=True"
            )
        with self._lock:
            in_queues, out_queues = self._open()
            try:
                self._share_threads(in_queues, out_queues)
                for queue, (stream, compute) in zip(in_queues, works, strict=True):
                    queue.put(Task(stream, compute=partial(self._work, compute, stop)))
                return [_result(queue.get()) for queue in out_queues]
            except BaseException:
                stop()
                self.close()
                raise

    def _work(self, compute: Callable[[], Result], stop: Callable[[], None]) -> Result:
        _current.workers = self
        try:
            return compute()
        except BaseException:
            stop()  # the others might wait for this one
            raise
        finally:
            _current.workers = None

    def close(self) -> None:
        """End the threads. The next run starts new ones."""
        scope, self._scope = self._scope, None
        if scope is not None and self._process == os.getpid():
            scope.close()

    def _open(self) -> tuple[list[InQueue], list[OutQueue]]:
        # A fork copies everything but the threads.
        if self._scope is None or self._process != os.getpid():
            scope = ExitStack()
            self._queues = scope.enter_context(spawn_workers(self._devices, shared=False, context=Context.plain()))
            self._scope, self._process, self._share = scope, os.getpid(), 0
        return self._queues

    def _share_threads(self, in_queues: Sequence[InQueue], out_queues: Sequence[OutQueue]) -> None:
        """Divide the intra-op threads that the caller may use among the workers that compute on the CPU."""
        on_cpu = [j for j, device in enumerate(self._devices) if device.type == "cpu"]
        share = max(1, torch.get_num_threads() // max(1, len(on_cpu)))
        if share != self._share:
            pins = _pins(len(on_cpu))
            for j, pin in zip(on_cpu, pins, strict=True):
                in_queues[j].put(Task(CPUStream, compute=partial(_settle, share, pin)))
            for j in on_cpu:
                _result(out_queues[j].get())
            self._share = share


def _pins(workers: int) -> list[set[int] | None]:
    """The cores of each worker on the CPU, if ``GPIPE_PIN_WORKERS=1`` asks for that and there are enough.

    Some kernels let threads that wake each other share one core while another idles. Pinning cures that; but several
    processes that pin would all take the same cores, so it has to be asked for.
    """
    if os.environ.get("GPIPE_PIN_WORKERS") != "1" or not hasattr(os, "sched_getaffinity"):
        return [None] * workers
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // max(1, workers)
    return [set(cores[k * each : (k + 1) * each]) or None for k in range(workers)]


def _settle(threads: int, cores: set[int] | None) -> None:
    """Give the worker that calls this its share of the processor."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    limit_threads(threads)


def _result(answer: Any) -> Any:
    succeeded, payload = answer
    if succeeded:
        return payload[1]
    if payload is None:
        raise RuntimeError("a worker of the pipe has ended while the pipe was running")
    raise payload[1]

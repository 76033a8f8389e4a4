"""A thread's life: it computes the tasks of one queue, in order, and answers each of them once."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch

from ._device import Device
from ._task import Task
from ._use import use_device

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]
"""What ``sys.exc_info()`` gives inside an ``except`` block."""

Answer: TypeAlias = tuple[Literal[True], tuple[Task[Any], Any]] | tuple[Literal[False], ExcInfo | None]

InQueue: TypeAlias = SimpleQueue[Task[Any] | None]
"""Tasks for a worker; ``None`` ends it."""

OutQueue: TypeAlias = SimpleQueue[Answer]
"""A worker's answers: ``(True, (task, result))``, ``(False, exc_info)``, and ``(False, None)`` when it ends."""


def worker(in_queue: InQueue, out_queue: OutQueue, device: Device, grad_mode: bool) -> None:
    """Compute the tasks of ``in_queue`` until ``None``; to be the target of a thread.

    Each task is answered once, in order, whatever happens in it: ``(True, (task, result))``, or ``(False, exc_info)``
    for any BaseException. The last thing in ``out_queue`` is ``(False, None)``. While it waits for the next task, the
    worker holds nothing of the last one.

    Args:
        device: current while tasks run. If it cannot be taken, that is the answer to every task.
        grad_mode: whether grad mode is on while they run.
    """
    try:
        with ExitStack() as scope:
            failure = _take(scope, device, grad_mode)
            while (task := in_queue.get()) is not None:
                out_queue.put(failure or _answer(task))
                del task
    finally:
        out_queue.put((False, None))


def _take(scope: ExitStack, device: Device, grad_mode: bool) -> Answer | None:
    """Enter what the worker works under; the answer to every task if that fails."""
    try:
        scope.enter_context(use_device(device))
        # Not without need: a torch function mode would see it.
        if torch.is_grad_enabled() != grad_mode:
            scope.enter_context(torch.set_grad_enabled(grad_mode))
    except BaseException:
        return False, _exc_info()
    return None


def _answer(task: Task[Any]) -> Answer:
    # A frame of its own: the traceback of a failure keeps the frame that caught it, which must not be the worker's.
    try:
        return True, (task, task.compute())
    except BaseException:
        return False, _exc_info()


def _exc_info() -> ExcInfo:
    kind, error, traceback = sys.exc_info()
    assert kind is not None
    assert error is not None
    assert traceback is not None
    return kind, error, traceback

"""The loop of a worker: it computes the tasks of one queue in order, and answers each once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ._device import Device
from ._task import Answer, ExcInfo, InQueue, OutQueue, Task
from ._use import use_device


def worker(in_queue: InQueue, out_queue: OutQueue, device: Device, grad_mode: bool) -> None:
    """Compute the tasks of ``in_queue`` until ``None``. Use it as the target of a thread.

    Each task is answered once, in order: by ``(True, (task, result))``, or by ``(False, exc_info)`` for any
    BaseException. The last answer is ``(False, None)``. While it waits for the next task, the worker keeps no reference
    to the last one.

    Args:
        in_queue: the tasks.
        out_queue: the answers.
        device: the current device while tasks run. If it cannot be made current, every task is answered by that error.
        grad_mode: whether grad mode is on while tasks run.
    """
    serve(in_queue, out_queue, lambda scope: take(scope, device, grad_mode))


def serve(in_queue: InQueue, out_queue: OutQueue, enter: Callable[[ExitStack], None]) -> None:
    """Answer tasks as :func:`worker` does, inside the contexts that ``enter`` enters; if it raises, by its error."""
    try:
        with ExitStack() as scope:
            failure = _failure(scope, enter)
            while (task := in_queue.get()) is not None:
                if task.begin():
                    task.answer(failure or _answer(task), out_queue)
                del task
    finally:
        out_queue.put((False, None))


def take(scope: ExitStack, device: Device, grad_mode: bool) -> None:
    """Make ``device`` current, and set the grad mode."""
    scope.enter_context(use_device(device))
    # Only if it differs: a torch function mode would see the call.
    if torch.is_grad_enabled() != grad_mode:
        scope.enter_context(torch.set_grad_enabled(grad_mode))


def _failure(scope: ExitStack, enter: Callable[[ExitStack], None]) -> Answer | None:
    """The answer to every task if ``enter`` raises; else None."""
    try:
        enter(scope)
    except BaseException:
        return False, _exc_info()
    return None


def _answer(task: Task[Any]) -> Answer:
    # In a function of its own: the traceback of an error refers to the frame that caught it, which would be the
    # worker's.
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

"""The loop of a worker: it computes the tasks of one queue in order, and answers each once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from ._device import Device
from ._task import Answer, ExcInfo, InQueue, OutQueue, Task
from ._use import use_device

Block = Callable[[], AbstractContextManager[object]]
"""Makes a context manager, in the thread that enters it."""


def worker(in_queue: InQueue, out_queue: OutQueue, device: Device, grad_mode: bool) -> None:
    """Compute the tasks of ``in_queue`` until ``None``. Use it as the target of a thread.

    Each task is answered once, in order: by ``(True, (task, result))``, or by ``(False, exc_info)`` for any
    BaseException. The last answer is ``(False, None)``. A waiting worker keeps no reference to its last task.

    Args:
        in_queue: the tasks.
        out_queue: the answers.
        device: the current device while tasks run. If it cannot be made current, every task is answered by that error.
        grad_mode: whether grad mode is on while tasks run.
    """
    serve(in_queue, out_queue, partial(use_device, device), partial(torch.set_grad_enabled, grad_mode))


def serve(in_queue: InQueue, out_queue: OutQueue, *blocks: Block) -> None:
    """Answer tasks as :func:`worker` does, inside ``blocks``; if one of them cannot be entered, by its error."""
    try:
        with ExitStack() as scope:
            failure = _failure(scope, blocks)
            while (task := in_queue.get()) is not None:
                out_queue.put(failure or _answer(task))
                del task  # or it would stay alive until the next one comes
    finally:
        out_queue.put((False, None))


def _failure(scope: ExitStack, blocks: tuple[Block, ...]) -> Answer | None:
    try:
        for block in blocks:
            scope.enter_context(block())
    except BaseException as error:
        return False, _exc_info(error)
    return None


def _answer(task: Task[Any]) -> Answer:
    # In a function of its own: the traceback of an error refers to the frame that caught it, which would be the
    # worker's.
    try:
        return True, (task, task.compute())
    except BaseException as error:
        return False, _exc_info(error)


def _exc_info(error: BaseException) -> ExcInfo:
    assert error.__traceback__ is not None
    return type(error), error, error.__traceback__

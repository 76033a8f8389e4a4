"""The worker loop: run the tasks of one queue in order, and answer each exactly once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from weakref import ReferenceType

import torch

from ._device import Device
from ._task import Answer, ExcInfo, InQueue, OutQueue, Task
from ._use import use_device

Block = Callable[[], AbstractContextManager[object]]
"""A function that returns a context manager; it runs in the thread that enters the context."""


def worker(in_queue: InQueue, out_queue: OutQueue, device: Device, grad_mode: bool) -> None:
    """Run the tasks of ``in_queue`` until ``None``. Use this function as the target of a thread.

    Each task is answered exactly once, in order, with ``(True, (task, result))``, or with ``(False, exc_info)`` for any
    BaseException. The last answer is ``(False, None)``. A waiting worker keeps no reference to its last task.

    Args:
        in_queue: the tasks.
        out_queue: the answers.
        device: the current device while tasks run. If it cannot be made current, the answer to every task is this
            error.
        grad_mode: whether grad mode is on while tasks run.
    """
    serve(in_queue, out_queue, partial(use_device, device), partial(torch.set_grad_enabled, grad_mode))


def serve(in_queue: InQueue, out_queue: OutQueue, *blocks: Block) -> None:
    """Answer tasks like :func:`worker`, inside ``blocks``. If a block cannot be entered, answer with its error."""
    try:
        with ExitStack() as scope:
            failure = _failure(scope, blocks)
            # A block that is freed without being left puts its dead reference instead of None.
            while (task := in_queue.get()) is not None and not isinstance(task, ReferenceType):
                out_queue.put(failure or _answer(task))
                del task  # otherwise it stays alive until the next task
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
    # This is a separate function, because a traceback refers to the frame that caught the error, and must not refer to
    # the frame of the loop.
    try:
        return True, (task, task.compute())
    except BaseException as error:
        return False, _exc_info(error)


def _exc_info(error: BaseException) -> ExcInfo:
    assert error.__traceback__ is not None
    return type(error), error, error.__traceback__

"""A function called by a worker, whose result comes as a future."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ._stream import AbstractStream, CPUStream
from ._task import Answer, InQueue, OutQueue, Task

Result = TypeVar("Result")

_log = logging.getLogger("streams")


def submit(in_queue: InQueue, function: Callable[[], Result], *, stream: AbstractStream = CPUStream) -> Future[Result]:
    """Let the worker that takes its tasks from ``in_queue`` call ``function``; the future of what that returns.

    It is answered instead of the out-queue, where nothing appears. It can be cancelled until the function begins;
    callbacks that are added to it run on the worker, which goes on with the next task after them. Where no worker takes
    tasks any more, because it has ended or stayed in the process that forked this one, the future is never done.

    Args:
        in_queue: of a worker, such as :func:`spawn_workers` gives.
        function: called without arguments. What it raises, any BaseException, is raised by ``result()``.
        stream: current while it runs.

    Returns:
        A future; ``result()`` waits for the worker.

    >>> from streams import spawn_workers
    >>> import torch
    >>> with spawn_workers([torch.device("cpu")]) as ([in_queue], _):
    ...     submit(in_queue, lambda: 6 * 7).result()
    42
    """
    task = _Submitted(stream, compute=function)
    in_queue.put(task)
    return task.future


class _Submitted(Task[Result]):
    """A task that answers a future."""

    __slots__ = ("future",)

    def __init__(self, stream: AbstractStream, *, compute: Callable[[], Result]) -> None:
        super().__init__(stream, compute=compute)
        self.future: Future[Result] = Future()

    def begin(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def answer(self, answer: Answer, out_queue: OutQueue) -> None:
        try:
            self._answer(answer)
        except BaseException:  # of a callback; futures themselves log what is an Exception
            _log.exception("a callback of a future failed; the worker goes on")

    def _answer(self, answer: Answer) -> None:
        if answer[0]:
            self.future.set_result(answer[1][1])
        elif answer[1] is not None:
            self.future.set_exception(answer[1][1])

"""Call a function on a worker, and return its result as a future."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ._stream import AbstractStream, CPUStream
from ._task import Answer, InQueue, OutQueue, Task

Result = TypeVar("Result")

_log = logging.getLogger("streams")


def submit(in_queue: InQueue, function: Callable[[], Result], *, stream: AbstractStream = CPUStream) -> Future[Result]:
    """Have the worker of ``in_queue`` call ``function``.

    The result is in the future, and not in the out-queue. The future can be cancelled until the function begins.
    Callbacks of the future run on the worker, before its next task. If the worker has ended, or is in the parent of a
    forked process, the future is never done.

    Args:
        in_queue: the in-queue of a worker, from :func:`spawn_workers` for example.
        function: called without arguments. Any BaseException that it raises is raised by ``result()``.
        stream: the current stream while it runs.

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
    """A task whose result goes to a future."""

    __slots__ = ("future",)

    def __init__(self, stream: AbstractStream, *, compute: Callable[[], Result]) -> None:
        super().__init__(stream, compute=compute)
        self.future: Future[Result] = Future()

    def begin(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def answer(self, answer: Answer, out_queue: OutQueue) -> None:
        try:
            if answer[0]:
                self.future.set_result(answer[1][1])
            else:
                self.future.set_exception(answer[1][1])
        except BaseException:  # an error of a callback that is not an Exception; futures log the others
            _log.exception("a callback of a future failed; the worker goes on")

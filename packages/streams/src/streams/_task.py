"""A piece of work for a worker."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from ._stream import AbstractStream, is_accelerator
from ._use import use_stream

Result = TypeVar("Result")


class Task(Generic[Result]):
    """Work in two halves, both under ``stream``: ``compute`` on a worker, then ``finalize`` on the caller.

    Args:
        stream: current while either half runs.
        compute: called by the worker without arguments; what it returns is the result.
        finalize: called with that result on the thread that took it out of the worker's queue, for work that has to be
            done there in order. ``None``: nothing.
    """

    __slots__ = ("__weakref__", "_compute", "_finalize", "stream")

    def __init__(
        self,
        stream: AbstractStream,
        *,
        compute: Callable[[], Result],
        finalize: Callable[[Result], object] | None = None,
    ) -> None:
        is_accelerator(stream)  # raises, here and not on the worker, if it is no stream
        if not callable(compute):
            raise TypeError(f"compute must be callable without arguments; got {compute!r}")
        if finalize is not None and not callable(finalize):
            raise TypeError(f"finalize must take the result of compute, or be None; got {finalize!r}")
        self.stream = stream
        self._compute = compute
        self._finalize = finalize

    def compute(self) -> Result:
        """Do the first half; its result."""
        with use_stream(self.stream):
            return self._compute()

    def finalize(self, result: Result) -> None:
        """Do the second half, given what :meth:`compute` returned.

        Args:
            result: of :meth:`compute`.
        """
        if self._finalize is None:
            return
        with use_stream(self.stream):
            self._finalize(result)

    def begin(self) -> bool:
        """Called by the worker when the turn of this task has come; whether it shall be done."""
        return True

    def answer(self, answer: Answer, out_queue: OutQueue) -> None:
        """Called by the worker, once, with what came of :meth:`compute`.

        Args:
            answer: the task and its result, or what was raised.
            out_queue: that of the worker.
        """
        out_queue.put(answer)


ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]
"""What ``sys.exc_info()`` gives inside an ``except`` block."""

Answer: TypeAlias = tuple[Literal[True], tuple[Task[Any], Any]] | tuple[Literal[False], ExcInfo | None]

InQueue: TypeAlias = SimpleQueue[Task[Any] | None]
"""Tasks for a worker; ``None`` ends it."""

OutQueue: TypeAlias = SimpleQueue[Answer]
"""A worker's answers: ``(True, (task, result))``, ``(False, exc_info)``, and ``(False, None)`` when it ends."""

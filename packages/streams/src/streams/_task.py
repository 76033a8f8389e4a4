"""A task of a worker."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from ._stream import AbstractStream, is_accelerator
from ._use import use_stream

Result = TypeVar("Result")


class Task(Generic[Result]):
    """Work in two parts, both under ``stream``: ``compute`` on a worker, ``finalize`` on the caller.

    Args:
        stream: the current stream while either part runs.
        compute: called by the worker without arguments; returns the result.
        finalize: called with the result on the thread that takes the answer from the out-queue; optional.

    >>> from streams import CPUStream
    >>> results = []
    >>> task = Task(CPUStream, compute=lambda: 42, finalize=results.append)
    >>> task.finalize(task.compute())
    >>> results
    [42]
    """

    __slots__ = ("__weakref__", "_compute", "_finalize", "stream")

    def __init__(
        self,
        stream: AbstractStream,
        *,
        compute: Callable[[], Result],
        finalize: Callable[[Result], object] | None = None,
    ) -> None:
        is_accelerator(stream)  # raises here, and not on the worker, if it is not a stream
        if not callable(compute):
            raise TypeError(f"compute must be callable without arguments; got {compute!r}")
        if finalize is not None and not callable(finalize):
            raise TypeError(f"finalize must take the result of compute, or be None; got {finalize!r}")
        self.stream = stream
        self._compute = compute
        self._finalize = finalize

    def compute(self) -> Result:
        """Run ``compute``, and return its result."""
        with use_stream(self.stream):
            return self._compute()

    def finalize(self, result: Result) -> None:
        """Run ``finalize`` with the result.

        Args:
            result: what :meth:`compute` returned.
        """
        if self._finalize is not None:
            with use_stream(self.stream):
                self._finalize(result)


ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]
"""What ``sys.exc_info()`` returns inside an ``except`` block."""

Answer: TypeAlias = tuple[Literal[True], tuple[Task[Any], Any]] | tuple[Literal[False], ExcInfo]
"""What a worker says of a task: ``(True, (task, result))`` or ``(False, exc_info)``."""

InQueue: TypeAlias = SimpleQueue[Task[Any] | None]
"""Tasks for a worker; ``None`` ends it."""

OutQueue: TypeAlias = SimpleQueue[Answer | tuple[Literal[False], None]]
"""Answers of a worker; the last is ``(False, None)``, when it ends."""

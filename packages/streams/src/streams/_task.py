"""A unit of work for a worker."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from . import _waiting as waiting
from ._stream import AbstractStream, is_accelerator
from ._use import use_stream

Result = TypeVar("Result")


class Task(Generic[Result]):
    """Work in two parts: ``compute`` runs on a worker, and ``finalize`` on the caller's thread.

    Args:
        stream: the current stream while either part runs.
        compute: a function without arguments that returns the result.
        finalize: an optional function of the result. The thread that takes the answer from the out-queue calls it.

    Raises TypeError if ``stream`` is not a stream, or a function is not callable.

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
        is_accelerator(stream)  # raises here instead of on the worker if it is not a stream
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
            result: the return value of :meth:`compute`.
        """
        if self._finalize is not None:
            with use_stream(self.stream):
                self._finalize(result)


ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]
"""The return value of ``sys.exc_info()`` inside an ``except`` block."""

Answer: TypeAlias = tuple[Literal[True], tuple[Task[Any], Any]] | tuple[Literal[False], ExcInfo]
"""The answer of a worker to a task: ``(True, (task, result))`` or ``(False, exc_info)``."""

InQueue: TypeAlias = waiting.SimpleQueue[Task[Any] | None]
"""The tasks of a worker; ``None`` stops it."""

OutQueue: TypeAlias = waiting.SimpleQueue[Answer | tuple[Literal[False], None]]
"""The answers of a worker. The last one is ``(False, None)``, when it stops."""

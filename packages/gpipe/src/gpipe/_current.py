"""Thread-local state: the current activity of a thread, as an immutable record that is replaced as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from .schedule import Step


class Store(Protocol):
    """Holds skips between stash and pop, by namespace and name. A ``dict`` is a store."""

    def __setitem__(self, key: tuple[Any, str], value: Tensor | None, /) -> None: ...

    def pop(self, key: tuple[Any, str], /) -> Tensor | None: ...


class Work(NamedTuple):
    """The current activity of a thread.

    Attributes:
        skips: the store for stash and pop; outside pipes, a store for plain modules.
        step: the step of a run that the thread takes; None outside runs.
        graph_task: torch's id of the backward in which the thread takes the steps of a run; -1 for none.
        microbatch: the micro-batch of the step; None while a loss is computed, which is outside all layers.
        phase: ``"checkpointing"`` in a forward whose graph will be freed and rebuilt, ``"recomputing"`` while it is
            rebuilt.
        rng: the ``CellRNG`` that layers draw from; None outside forwards.
        statistics: the batch norm statistics of the mini-batch so far; None if a layer must not count its input, for
            example in a recomputation.
        recompute_under: returns the context for recomputations: the settings of the forward, if the backward has
            different ones.
    """

    skips: Store
    step: Step | None = None
    graph_task: int = -1
    microbatch: int | None = None
    phase: Literal["", "checkpointing", "recomputing"] = ""
    rng: Any = None
    statistics: Any = None
    recompute_under: Callable[[], AbstractContextManager[None]] = nullcontext


class Current(threading.local):
    """The current activity of each thread, as ``current.work``."""

    work: Work

    def __init__(self) -> None:
        self.work = Work({})


current = Current()


class doing:  # noqa: N801 — reads as a function after `with`
    """Temporarily change some attributes of ``current.work``."""

    # Not a generator, which takes twice as long.
    __slots__ = ("_before", "_changes")

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._before = current.work
        current.work = self._before._replace(**self._changes)

    def __exit__(self, *error: object) -> None:
        current.work = self._before

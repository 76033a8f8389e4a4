"""What the calling thread is doing: one frozen record, replaced as a whole and never changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from .schedule import Step


class Store(Protocol):
    """Holds skips that have been stashed and not popped yet, by namespace and name. A ``dict`` is a store."""

    def __setitem__(self, key: tuple[Any, str], value: Tensor | None, /) -> None: ...

    def pop(self, key: tuple[Any, str], /) -> Tensor | None: ...


class Work(NamedTuple):
    """What a thread is doing.

    Attributes:
        skips: the store for stash and pop; outside of pipes, one for plain modules.
        step: the step of a run that the thread takes; None outside of runs.
        graph_task: torch's number of the backward in which the thread takes the steps of a run; -1 for none.
        microbatch: the micro-batch of that step; None while a loss is computed, which is outside of all layers.
        phase: what will become, or has become, of the graph of a forward: ``"checkpointing"`` if it is going to be
            freed and rebuilt, ``"recomputing"`` while it is rebuilt.
        rng: the ``CellRNG`` from which layers draw; None outside of forwards.
        statistics: those of batch norm for the mini-batch so far; None where a layer must not count its input, as in a
            recomputation.
        blocks: the engine's ``Block`` for each run of layers that are recomputed on their own.
        recompute_under: makes the context in which forwards are recomputed: the settings of the forward, if the
            backward has others.
        tape: the forward of a segment of a flattened model.
    """

    skips: Store
    step: Step | None = None
    graph_task: int = -1
    microbatch: int | None = None
    phase: Literal["", "checkpointing", "recomputing"] = ""
    rng: Any = None
    statistics: Any = None
    blocks: Sequence[Any] = ()
    recompute_under: Callable[[], AbstractContextManager[None]] = nullcontext
    tape: Any = None


class Current(threading.local):
    """What each thread is doing, as ``current.work``."""

    work: Work

    def __init__(self) -> None:
        self.work = Work({})


current = Current()


class doing:  # noqa: N801 — reads as a function after `with`
    """A context in which some attributes of what this thread is doing have other values."""

    # Not a generator, which takes twice as long.
    __slots__ = ("_before", "_changes")

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._before = current.work
        current.work = self._before._replace(**self._changes)

    def __exit__(self, *error: object) -> None:
        current.work = self._before

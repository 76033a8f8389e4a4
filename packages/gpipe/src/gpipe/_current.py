"""All state of the calling thread in a run: which cell it works for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from .schedule import Step


class Store(Protocol):
    """Holds skips that have been stashed and not popped yet, by namespace and name. A ``dict`` is a store."""

    def __setitem__(self, key: tuple[Any, str], value: Tensor | None, /) -> None: ...

    def pop(self, key: tuple[Any, str], /) -> Tensor | None: ...


class Current(threading.local):
    """The state of one thread.

    Attributes:
        step: the step that the thread does or is about to do; None outside of runs.
        microbatch: the micro-batch of that step; None in the loss.
        statistics: those of batch norm for the mini-batch so far; None in a recomputation or a backward, where a layer
            must not count its input twice.
        checkpointing: whether this is a forward whose graph will be rebuilt later.
        rng: the ``CellRNG`` of the cell; None outside of forwards.
        blocks: the engine's ``Block`` for each run of layers that are computed again.
        graph_task: torch's number of the backward in which this thread takes the steps of a run; -1 for none.
        skips: the store for stash and pop; outside of pipes one for plain modules.
        tape: the forward of a segment of a flattened model that goes on.
        observed: what an observer has recorded of the action so far.
        serves: the engine's ``Section`` of each pipe whose run waits for this thread.
        holds: the critical sections that this thread is inside of, the outermost first.
        cores: the cores to which this thread is bound; empty if it is not bound.
    """

    step: Step | None = None
    microbatch: int | None = None
    statistics: Any = None
    checkpointing = False
    recomputing = False
    rng: Any = None
    blocks: Sequence[Any] = ()
    graph_task = -1
    skips: Store
    tape: Any = None
    observed: Any = None
    serves: tuple[Any, ...] = ()
    holds: tuple[Any, ...] = ()
    cores: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.skips = {}


current = Current()


def restore(before: dict[str, Any]) -> None:
    """Give :data:`current` the attributes that it had: ``before`` is a copy of its ``vars``."""
    own = vars(current)
    for name in own.keys() - before.keys():
        del own[name]
    own.update(before)


class setting:  # noqa: N801 — reads as a function after `with`
    """A context in which attributes of :data:`current` have these values."""

    # Not a generator, which takes twice as long.
    __slots__ = ("_before", "_values")

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __enter__(self) -> None:
        self._before = {name: getattr(current, name) for name in self._values}
        current.__dict__.update(self._values)

    def __exit__(self, *error: object) -> None:
        current.__dict__.update(self._before)

"""The state of the calling thread in a run: all of it is kept here.

Layers, batch norm, skips and operations that draw random numbers look up here for which cell they work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ._moments import MiniBatchStatistics
from .schedule import Step


class LayerRNG(Protocol):
    """The random numbers of the layers of a cell.

    Attributes:
        module: the partition, which says by :meth:`layer` where a layer begins.
        follows: whether draws are followed now.
    """

    module: nn.Module | None
    follows: bool

    def layer(self, k: int) -> AbstractContextManager[None]:
        """Around layer ``k`` of the cell."""

    def draw(self) -> torch.Generator:
        """What an operation that draws on the CPU shall draw from."""


class Section(Protocol):
    """A section that one thread at a time may be in; that thread may enter it again."""

    def entered(self, *, accumulates: bool = False) -> AbstractContextManager[None]:
        """Wait until no other thread is inside, and be inside."""


class Store(Protocol):
    """Holds the skips that have been stashed and not popped yet, by namespace and name. A ``dict`` is one."""

    def __setitem__(self, key: tuple[Any, str], value: Tensor | None, /) -> None: ...

    def pop(self, key: tuple[Any, str], /) -> Tensor | None: ...


class Current(threading.local):
    """The state of one thread.

    Attributes:
        step: of a walk, which the thread does or is about to; None outside of runs.
        microbatch: the index of the micro-batch of that step; None outside of runs, and in the loss.
        statistics: what batch norm has seen of the mini-batch so far. None in a recomputation or a backward, where
            a layer may run again, and must not count its input twice.
        checkpointing: whether this is a forward whose graph will be rebuilt later.
        recomputing: whether this is a recomputation.
        rng: the random numbers of the layers of the cell; None if nobody follows what any of them draws.
        followed: whose draws are handed over at each operation that draws, and at no other; see
            :class:`gpipe.checkpoint._interception.Interception`.
        rng_paused: whether an operation draws for the machinery of ``rng`` itself.
        skips: where layers stash to and pop from; a store that serves plain modules outside of pipes.
        observed: what an observer has seen of the action so far.
        serves: the critical sections of pipes whose runs wait for this thread.
        holds: the critical sections that this thread is inside of, the outermost first.
        cores: of which those that this thread is bound to are a share; empty if it is not.
    """

    step: Step | None = None
    microbatch: int | None = None
    statistics: MiniBatchStatistics | None = None
    checkpointing = False
    recomputing = False
    rng: LayerRNG | None = None
    followed: LayerRNG | None = None
    rng_paused = False
    skips: Store
    observed: Any = None
    serves: tuple[Section, ...] = ()
    holds: tuple[Section, ...] = ()
    cores: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.skips = {}


current = Current()


@contextmanager
def setting(**values: Any) -> Iterator[None]:
    """Inside, attributes of :data:`current` have these values."""
    before = {name: getattr(current, name) for name in values}
    current.__dict__.update(values)
    try:
        yield
    finally:
        current.__dict__.update(before)

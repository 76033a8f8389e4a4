"""Stages that blocks are placed on, and the modes in which a stage can run its block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._numbers import Number


@dataclass(frozen=True)
class Mode:
    """A way to run a block, for example with recomputation, with its factors on time and memory.

    A stage with f micro-batches in flight in this mode takes `time` · costs / speed, and needs this much memory::

        Σ memory + (f · `saved` + `transient`) · Σ activations

    name: the name of the mode in `Placement.modes`.
    time: a factor on the costs.
    saved: the fraction of the activations that is saved per micro-batch.
    transient: the additional fraction of the activations that is needed once, for example during a recomputation.

    >>> Mode("recompute", time=4/3, saved=0.1, transient=1).name
    'recompute'
    """

    name: str
    time: Number = 1
    saved: Number = 1
    transient: Number = 0


@dataclass(frozen=True)
class Stage:
    """A device: a block of cost c takes the time c / speed, and can use at most `capacity` memory (None: no limit).

    modes: the modes in which it may run its block. `place` chooses the first of the best modes. Without modes the
        stage saves all activations, as in `Mode(time=1, saved=1, transient=0)`.

    Raises TypeError if an item of `modes` is not a Mode, and ValueError if two modes have the same name.
    """

    speed: Number = 1
    capacity: Number | None = None
    modes: Sequence[Mode] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", tuple(self.modes))
        for i, mode in enumerate(self.modes):
            if not isinstance(mode, Mode):
                raise TypeError(f"modes[{i}] must be a Mode, got {mode!r} of type {type(mode).__name__}")
        if len({mode.name for mode in self.modes}) < len(self.modes):
            raise ValueError(f"a stage's modes must have different names, got {self.modes}")

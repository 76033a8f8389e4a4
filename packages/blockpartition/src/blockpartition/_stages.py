"""The stages on which blocks are placed, and the modes in which they may run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._numbers import Number


@dataclass(frozen=True)
class Mode:
    """A way to run a block, for example with recomputation, with its factors on time and memory.

    A stage that holds f micro-batches in this mode takes `time` · costs / speed, and needs

        Σ memory + (f · `saved` + `transient`) · Σ activations

    name: the name of the mode in `Placement.modes`.
    time: a factor on the costs.
    saved: what a stage keeps of each micro-batch, a factor on the activations.
    transient: what is needed once in addition, such as by a recomputation: a factor on the activations.

    >>> Mode("recompute", time=4/3, saved=0.1, transient=1).name
    'recompute'
    """

    name: str
    time: Number = 1
    saved: Number = 1
    transient: Number = 0


@dataclass(frozen=True)
class Stage:
    """A device: a block of cost c takes the time c / speed, and may need at most `capacity` memory (None: any amount).

    modes: the modes in which it may run its block. `place` chooses one; of equally good ones, the first. Without
        modes it keeps all activations: `Mode(time=1, saved=1, transient=0)`.
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

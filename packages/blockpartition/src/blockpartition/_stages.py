"""The devices that blocks are placed on, and the ways in which they may work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ._grid import Number, shown


@dataclass(frozen=True)
class Mode:
    """A way to run a block, such as with or without recomputation, at a price in time and in memory.

    A stage that holds f micro-batches in this mode takes `time` · costs / speed, and needs

        Σ memory + (f · `saved` + `transient`) · Σ activations + f · `boundary` · what enters its first layer

    with the sums over its layers.

    name: what `Placement.modes` calls it.
    time: a factor on the costs, or the costs of all layers in this mode.
    saved: what a micro-batch leaves on the stage: a factor on the activations, or an amount for each layer.
    boundary: how many times a micro-batch's tensor at the stage's first cut is kept; see `boundary` of `place`.
    transient: what is needed once besides, such as one micro-batch recomputed: a factor, or an amount for each layer.

    >>> Mode("recompute", time=4/3, saved=0, transient=1).name
    'recompute'
    """

    name: str
    time: Number | Sequence[Number] = 1
    saved: Number | Sequence[Number] = 1
    boundary: Number = 1
    transient: Number | Sequence[Number] = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a str, got {shown(self.name)} of type {type(self.name).__name__}")
        for field in ("time", "saved", "transient"):  # tuples can be hashed and do not change
            object.__setattr__(self, field, _frozen(getattr(self, field)))


@dataclass(frozen=True)
class Stage:
    """A device: a block of cost c takes c / speed, and may need `capacity` memory at most (None: any amount).

    modes: the ways in which it may run its block, of which `place` chooses one; the earlier where both are as good.
        Without any, it keeps all activations: `Mode(time=1, saved=1, boundary=1, transient=0)`.
    """

    speed: Number = 1
    capacity: Number | None = None
    modes: Sequence[Mode] = ()

    def __post_init__(self) -> None:
        if isinstance(self.modes, (str, Mode)) or not isinstance(self.modes, Iterable):
            raise TypeError(f"modes must be a sequence of Modes, got {shown(self.modes)}")
        object.__setattr__(self, "modes", tuple(self.modes))
        for i, mode in enumerate(self.modes):
            if not isinstance(mode, Mode):
                raise TypeError(f"modes[{i}] must be a Mode, got {shown(mode)} of type {type(mode).__name__}")
        for name, count in Counter(mode.name for mode in self.modes).items():
            if count > 1:
                raise ValueError(f"{count} modes are called {name!r}; the names of a stage's modes must differ")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else value

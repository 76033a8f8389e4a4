"""The stages on which blocks are placed, and the modes in which they may run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ._numbers import Number, shown


@dataclass(frozen=True)
class Mode:
    """A way to run a block, for example with recomputation, with its factors on time and memory.

    A stage that holds f micro-batches in this mode takes `time` · costs / speed, and needs

        Σ memory + (f · `saved` + `transient`) · Σ activations + f · `boundary` · size of its first layer's input

    with the sums over its layers.

    name: the name of the mode in `Placement.modes`.
    time: a factor on the costs, or the costs of all layers in this mode.
    saved: what a stage keeps of each micro-batch: a factor on the activations, or an amount for each layer.
    boundary: a factor on the size of the stage's input; see `boundary` of `place`.
    transient: what is needed once in addition, such as by the recomputation of one micro-batch: a factor on the
        activations, or an amount for each layer.

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
        for field in ("time", "saved", "transient"):  # tuples are hashable and do not change
            object.__setattr__(self, field, _frozen(getattr(self, field)))


@dataclass(frozen=True)
class Stage:
    """A device: a block of cost c takes the time c / speed, and may need at most `capacity` memory (None: any amount).

    modes: the modes in which it may run its block. `place` chooses one; of equally good ones, the first. Without
        modes it keeps all activations: `Mode(time=1, saved=1, boundary=1, transient=0)`.
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

"""The modes of stages in exact numbers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ._arguments import vector
from ._grid import Grid, kind_of, ratio
from ._stages import Mode, Stage

_PLAIN = Mode("")


@dataclass(frozen=True)
class Option:
    """One mode of one stage. What was given for each layer is a grid, a factor is a fraction.

    pace: how much of the costs a unit of time does.
    costs: the costs in this mode where they are its own.
    kind: the kind of number of its times.
    """

    name: str | None
    pace: Fraction
    costs: Grid | None
    saved: Fraction | Grid
    boundary: Fraction
    transient: Fraction | Grid
    kind: type

    @property
    def factors(self) -> list[Fraction]:
        """All factors on memory."""
        return [x for x in (self.saved, self.boundary, self.transient) if isinstance(x, Fraction)]


def read_options(stages: list[Stage], paces: Grid, layers: int) -> list[list[Option]]:
    """For each stage its modes, at least one; TypeError or ValueError names what is wrong with them."""
    known: dict[tuple[int, Fraction], list[Option]] = {}  # equal stages are mostly one object, many times
    found = []
    for j, (stage, units) in enumerate(zip(stages, paces.units, strict=True)):
        key = id(stage), Fraction(units, paces.scale)
        if key not in known:
            known[key] = [_option(mode, key[1], f"stage[{j}]", layers, paces.kind) for mode in stage.modes or [_PLAIN]]
        found.append(known[key])
    return found


def _option(mode: Mode, speed: Fraction, stage: str, layers: int, kind: type) -> Option:
    where = f"of mode {mode.name!r} of {stage}"
    time = _amount(mode.time, f"time {where}", layers)
    if isinstance(time, Fraction) and not time:
        raise ValueError(f"time {where} must be positive, got {mode.time!r}")
    return Option(
        None if mode is _PLAIN else mode.name,
        speed / time if isinstance(time, Fraction) else speed,
        None if isinstance(time, Fraction) else time,
        _amount(mode.saved, f"saved {where}", layers),
        Fraction(*ratio(mode.boundary, f"boundary {where}")),
        _amount(mode.transient, f"transient {where}", layers),
        time.kind if isinstance(time, Grid) else kind_of([mode.time]),
    )


def _amount(value: Any, name: str, layers: int) -> Fraction | Grid:
    return vector(value, name, layers) if isinstance(value, tuple) else Fraction(*ratio(value, name))

"""Make a plan from the results of a search."""

from __future__ import annotations

from collections.abc import Sequence

from ..timeline import simulate
from ._candidate import Candidate, Space
from ._data import Alternative, Expected, Prediction, Remembered, layer_keys
from ._plan import Plan
from ._request import Request
from ._search import NEAR

SHOWN = 8
"""The number of alternatives that a plan keeps."""


def plan_of(found: Sequence[Candidate], space: Space, request: Request, spread: Expected, notes: Sequence[str]) -> Plan:
    """The first of those ``found`` as a plan, and the others as alternatives.

    Args:
        found: the best first.
        space: what was searched.
        request: what was asked for.
        spread: how steps are around a replayed one, as factors.
        notes: how the figures came about.
    """
    best, others = found[0], found[1:]
    stages, hops = best.costs.stage_costs(best.sizes, best.modes), best.costs.hops(best.sizes)
    bubble = simulate(best.program(best.chunks), stages, transfer=hops[1:]).bubble
    seconds = Expected(*(best.seconds * factor for factor in (spread.low, spread.mid, spread.high)))
    replicas = space.measured.replicas
    rows = space.measured.rows * replicas
    return Plan(
        layers=layer_keys(request.layers),
        devices=tuple(request.names[: len(stages)]),
        memory=tuple(space.memory),
        rows=rows,
        sizes=best.sizes,
        chunks=best.chunks,
        schedule=best.schedule,
        modes=best.modes,
        split=best.split,
        predicted=Prediction(seconds, best.bytes, rows / seconds.mid, bubble),
        stages=tuple(stages),
        hops=tuple(hops),
        replicas=replicas,
        reduction=best.costs.reduction(best.sizes),
        alternatives=tuple(_alternative(best, other, spread.mid) for other in others[:SHOWN]),
        notes=(*notes, best.note),
        _here=Remembered(loss_fn=request.loss_fn, sample=request.sample),
    )


def _alternative(best: Candidate, other: Candidate, factor: float) -> Alternative:
    return Alternative(
        other.chunks,
        other.schedule,
        other.sizes,
        other.modes,
        other.seconds * factor,
        other.fullest,
        _reason(best, other),
    )


def _reason(best: Candidate, other: Candidate) -> str:
    """Why ``other`` was not taken."""
    slower = other.seconds / best.seconds - 1
    if slower > NEAR:
        return f"{slower:.0%} slower"
    speed = "as fast" if abs(slower) < 0.005 else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    differs = "less simple" if other.simplicity > best.simplicity else "another balance"
    return f"{speed}, {differs if len(other.sizes) == len(best.sizes) else 'another number of stages'}"

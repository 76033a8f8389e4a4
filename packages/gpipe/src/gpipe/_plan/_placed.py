"""The balance and modes that are best by the closed form, as :func:`blockpartition.place` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from blockpartition import Infeasible, Mode, Stage, place

from ..schedule._flags import StageMode, mode_of
from ..timeline._kept import shares
from ._candidate import Space
from ._costs import Costs, bounds
from ._memory import held_by

PARTS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
"""The shares of layers that may count as recomputed while a balance is looked for, before layers are chosen."""

Placed = tuple[tuple[int, ...], tuple[StageMode, ...]]
Objective = Literal["bottleneck", "makespan"]

_GAP = 0.01
_TICKS = 1e9  # a second, in the whole numbers that make `place` fast


def best_placed(
    space: Space,
    costs: Costs,
    schedule: str | None = None,
    rooms: Sequence[int | None] | None = None,
    objective: Objective = "makespan",
    parts: Sequence[Fraction] = (),
) -> Placed | None:
    """The balance and modes that are best by the closed form, or its slowest stage; None if nothing fits.

    Args:
        space: what is searched.
        costs: of micro-batches of one size.
        schedule: its name, which says how many micro-batches a stage holds; None only where memory is unlimited.
        rooms: what each device may hold; None is any amount, and nothing is recomputed.
        objective: the closed form of a step, or its slowest stage.
        parts: more modes, in which that part of each layer is recomputed.
    """
    stages = len(space.modes)
    limits = [None] * stages if rooms is None else list(rooms)
    allowed = [modes[:1] if rooms is None else modes for modes in space.modes]
    options = [
        Stage(capacity=room, modes=[*(_mode(costs, j, mode) for mode in modes), *(_partly(costs, j, p) for p in parts)])
        for j, (room, modes) in enumerate(zip(limits, allowed, strict=True))
    ]
    bounded = rooms is not None and schedule is not None
    split = range(stages) if schedule == "zero_bubble" else ()
    try:
        placed = place(
            [0] * costs.measured.layers,
            options,
            memory=costs.fixed_bytes() if bounded else None,
            activations=shares(costs.profiles[0].layers) if bounded else None,
            boundary=costs.incoming if bounded else None,
            in_flight=held_by(schedule, costs.chunks, stages, split) if bounded and schedule else None,
            objective=objective,
            microbatches=costs.chunks,
            gap=_GAP,
            transfer=_transfer(costs),
        )
    except Infeasible:
        return None
    found = zip(allowed, placed.modes, bounds(placed.sizes), strict=True)
    return placed.sizes, tuple(_own(modes, str(name), *layers) for modes, name, layers in found)


def _own(modes: Sequence[StageMode], name: str, first: int, end: int) -> StageMode:
    """What a stage of these layers has of the mode of that name."""
    mode = next((mode for mode in modes if str(mode) == name), name)
    return mode if isinstance(mode, str) else mode_of(mode[first:end])


def _transfer(costs: Costs) -> list[int] | None:
    """What a cut after each layer costs, if links take time: that of the slowest, there and back."""
    outputs = [layer.output_bytes for layer in costs.profiles[0]]
    ticks = [round(2 * _TICKS * max(link(size) for link in costs.measured.links)) for size in outputs]
    return ticks[:-1] if any(ticks) else None


def _mode(costs: Costs, stage: int, mode: StageMode) -> Mode:
    again = [mode != "never"] * costs.measured.layers if isinstance(mode, str) else mode
    time = [round(_TICKS * seconds) for seconds in costs.work(stage, again)]
    kept = 1 if costs.measured.copied[stage] or mode != "never" else 0
    if mode == "never":
        return Mode("never", time=time, boundary=kept)
    if isinstance(mode, str):
        return Mode(mode, time=time, saved=0, transient=2 if mode == "except_last" else 1, boundary=kept)
    layers = costs.profiles[0].layers
    saved = [
        (layer.output_bytes if follows else 0) if flag else share
        for layer, share, flag, follows in zip(layers, shares(layers), mode, _followed(mode), strict=True)
    ]
    return Mode(str(mode), time=time, saved=saved, boundary=kept)


def _followed(flags: Sequence[bool]) -> list[bool]:
    """Of each layer, whether the next one keeps its input."""
    return [*(not flag for flag in flags[1:]), True]


def _partly(costs: Costs, stage: int, part: Fraction) -> Mode:
    """As if that part of each layer was computed again: what it left is its output then, and pieces come one by one."""
    layers = costs.profiles[0].layers
    never, always = (costs.work(stage, [again] * len(layers)) for again in (False, True))
    time = [round(_TICKS * (a + float(part) * (b - a))) for a, b in zip(never, always, strict=True)]
    saved = max(1, sum(shares(layers)))
    sent = Fraction(min(16 * sum(layer.output_bytes for layer in layers) // saved, 16), 16) / 2
    kept = 1 if costs.measured.copied[stage] else 0
    return Mode(str(part), time=time, saved=1 - part + part * sent, transient=part / 4, boundary=kept)

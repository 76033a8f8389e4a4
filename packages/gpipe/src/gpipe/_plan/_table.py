"""Format a plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from profiler.text import align, format_bytes, format_seconds, format_share

from ._costs import bounds
from ._data import Alternative

if TYPE_CHECKING:
    from ._plan import Plan

_MANY = 8


def report(plan: Plan) -> str:
    parts = [_heading(plan), align([*_stages(plan)], left=4)]
    rows = [["alternative", "chunks", "checkpoint", "balance", "step", "peak memory", "why not"]]
    rows += map(_alternative, plan.alternatives)
    parts += [align(rows, left=7)] if plan.alternatives else []
    parts += ["\n".join(f"- {note}" for note in plan.notes)]
    return "\n\n".join(parts)


def _heading(plan: Plan) -> str:
    found, seconds = plan.predicted, plan.predicted.seconds
    between = f"{format_seconds(seconds.low)} to {format_seconds(seconds.high)}"
    marked = ", estimated, not measured" if plan.is_estimate else ""
    return (
        f"balance={plan.balance}, chunks={plan.chunks}, checkpoint={plan.checkpoint}, "
        f"schedule={plan.schedule!r}\n"
        f"a step of {plan.rows} rows{marked}: {format_seconds(seconds.mid)} ({between}), "
        f"{found.throughput:.4g} rows/s, bubble {format_share(found.bubble)}"
    )


def _stages(plan: Plan) -> Iterable[list[str]]:
    yield ["stage", "device", "layers", "checkpoint", "forward", "backward", "activations", "memory", "of"]
    for j, (stage, (begin, end), place) in enumerate(zip(plan.stages, bounds(plan.sizes), plan.placement, strict=True)):
        need, size = plan.predicted.bytes[place], plan.memory[place]
        first, last, mode = plan.layers[begin].name, plan.layers[end - 1].name, plan.modes[j]
        yield [
            str(j),
            plan.devices[place] if len(plan.devices) == len(plan.sizes) else f"{place}, {plan.devices[place]}",
            first if first == last else f"{first} … {last}",
            mode,
            format_seconds(stage.forward),
            format_seconds(stage.backward) + (" (split)" if j in plan.split else ""),
            format_bytes(need.activations + need.transient),
            format_bytes(need.total),
            "–" if size is None else format_bytes(size),
        ]


def _alternative(other: Alternative) -> list[str]:
    modes = other.checkpoint
    return [
        other.schedule,
        str(other.chunks),
        modes[0] if len(set(modes)) == 1 else _listed(modes),
        _listed(other.balance),
        format_seconds(other.seconds),
        format_bytes(other.bytes),
        other.reason,
    ]


def _listed(values: Sequence[object]) -> str:
    """Return the values as text. Repeated values in a long list are written once, with a count."""
    if len(values) <= _MANY:
        return ", ".join(map(str, values))
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{value} × {count}" if count > 1 else str(value) for value, count in runs)

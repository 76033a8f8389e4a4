"""Format a plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from profiler.text import align, format_bytes, format_seconds, format_share

from ._costs import bounds
from ._data import Alternative

if TYPE_CHECKING:
    from ._plan import Plan

_MANY = 8


def report(plan: Plan) -> str:
    parts = [_heading(plan), align([*_stages(plan)], left=4), align([*_devices(plan)], left=1)]
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
        f"{found.throughput:.4g} rows/s, devices {format_share(1 - found.bubble)} busy"
    )


def _stages(plan: Plan) -> Iterable[list[str]]:
    yield ["stage", "device", "layers", "checkpoint", "forward", "backward"]
    names = _device_names(plan)
    for j, (stage, (begin, end), place) in enumerate(zip(plan.stages, bounds(plan.sizes), plan.placement, strict=True)):
        first, last, mode = plan.layers[begin].name, plan.layers[end - 1].name, plan.modes[j]
        split = " (split)" if j in plan.split else ""
        yield [
            str(j),
            names[place],
            first if first == last else f"{first} … {_beyond(first, last)}",
            mode,
            format_seconds(stage.forward),
            format_seconds(stage.backward) + split,
        ]


def _beyond(first: str, last: str) -> str:
    """Return ``last`` without the modules that it shares with ``first``.

    >>> _beyond("model.layers.0", "model.layers.13"), _beyond("embedding", "blocks.3")
    ('13', 'blocks.3')
    """
    pairs = zip(first.split("."), last.split("."), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return ".".join(last.split(".")[shared:])


def _devices(plan: Plan) -> Iterable[list[str]]:
    """Yield the peak bytes of each device by kind, and its limit."""
    yield ["device", *plan.predicted.bytes[0].by_kind, "total", "of"]
    for name, need, size in zip(_device_names(plan), plan.predicted.bytes, plan.memory, strict=True):
        each = map(format_bytes, need.by_kind.values())
        yield [name, *each, format_bytes(need.total), "–" if size is None else format_bytes(size)]


def _device_names(plan: Plan) -> list[str]:
    """Return the devices as text, with their indices unless they are as many different ones as stages."""
    if len(plan.devices) == len(plan.sizes) and len({*plan.devices}) == len(plan.devices):
        return [*plan.devices]
    return [f"{k}, {device}" for k, device in enumerate(plan.devices)]


def _alternative(other: Alternative) -> list[str]:
    modes = other.checkpoint
    return [
        other.schedule,
        str(other.chunks),
        modes[0] if len(set(modes)) == 1 else _format_values(modes),
        _format_values(other.balance),
        format_seconds(other.seconds),
        format_bytes(other.bytes),
        other.reason,
    ]


def _format_values(values: Sequence[object]) -> str:
    """Return the values as text. Repeated values in a long list are written once, with a count."""
    if len(values) <= _MANY:
        return ", ".join(map(str, values))
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{value} × {count}" if count > 1 else str(value) for value, count in runs)

"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

from profiler.text import align, format_bytes, format_seconds, format_share

from ..schedule._flags import StageMode, runs_of
from ._bytes import DeviceBytes
from ._costs import bounds, busy
from ._data import Alternative, PlanData

_BAR = 24
_MANY = 8
_SYMBOLS = {
    "parameters": "█", "gradients": "▓", "optimizer": "▒", "activations": "▚", "transient": "░",
}  # fmt: skip


def report(plan: PlanData) -> str:
    """The report: a summary, a line for each stage, a bar for each device, alternatives, and notes."""
    parts = [_heading(plan), align(_stages(plan), left=4), _memory(plan)]
    parts += [align(_alternatives(plan), left=7)] if plan.alternatives else []
    parts += ["\n".join(f"- {note}" for note in plan.notes)] if plan.notes else []
    return "\n\n".join(parts)


def _heading(plan: PlanData) -> str:
    """The gist, in two lines."""
    found, seconds = plan.predicted, plan.predicted.seconds
    between = f"{format_seconds(seconds.low)} to {format_seconds(seconds.high)}"
    marked = ", an estimate that was not measured" if plan.is_estimate else ""
    return (
        f"{_replicas(plan)}balance={plan.balance}, chunks={plan.chunks}, checkpoint={[*map(shown, plan.modes)]}, "
        f"schedule={plan.schedule!r}\n"
        f"a step of {plan.rows} rows{marked}: {format_seconds(seconds.mid)} ({between}), "
        f"{found.throughput:.4g} rows/s, bubble {format_share(found.bubble)}{_reduction(plan)}"
    )


def _replicas(plan: PlanData) -> str:
    stages = len(plan.sizes)
    if plan.replicas == 1:
        return ""
    return (
        f"replicas={plan.replicas} × {stages} stages = {plan.replicas * stages} devices, "
        f"{plan.rows // plan.replicas} rows each: "
    )


def _reduction(plan: PlanData) -> str:
    return f", average of gradients {format_seconds(plan.reduction)}" if plan.replicas > 1 else ""


def _stages(plan: PlanData) -> list[list[str]]:
    """The head and a line for each stage."""
    rows = [["stage", "device", "layers", "checkpoint", "forward", "backward", "a micro-batch"]]
    for j, (stage, (begin, end)) in enumerate(zip(plan.stages, bounds(plan.sizes), strict=True)):
        first, last = plan.layers[begin].name, plan.layers[end - 1].name
        names = first if first == last else f"{first} … {last}"
        split = " (split)" if j in plan.split else ""
        rows.append(
            [str(j), plan.devices[j], names, _recomputed(plan.modes[j]), format_seconds(stage.forward),
             format_seconds(stage.backward) + split, format_seconds(busy(stage, plan.modes[j]))]
        )  # fmt: skip
    return rows


def _recomputed(mode: StageMode) -> str:
    return mode if isinstance(mode, str) else f"{shown(mode)} recomputed"


def shown(mode: StageMode) -> str:
    """Text for readers; layers are counted from 1.

    >>> shown("never"), shown((False, False, True, True, False, True))
    ('never', 'layers 3-4, 6 of 6')
    """
    if isinstance(mode, str):
        return mode
    runs = [(first + 1, end) for flag, first, end in runs_of(mode) if flag]
    numbers = ", ".join(str(end) if first == end else f"{first}-{end}" for first, end in runs)
    return f"layer{'s' * (sum(mode) > 1)} {numbers} of {len(mode)}"


def _memory(plan: PlanData) -> str:
    largest = max([*(each.total for each in plan.predicted.bytes), *(size or 0 for size in plan.memory)])
    rows = [["device", "memory", "", "of"]]
    for j, need in enumerate(plan.predicted.bytes):
        size = plan.memory[j]
        room = "–" if size is None else format_bytes(size)
        rows.append([f"{j} {plan.devices[j]}", _bar(need, size, largest), format_bytes(need.total), room])
    legend = ", ".join(f"{symbol} {kind}" for kind, symbol in _SYMBOLS.items())
    return f"{align(rows, left=2)}\n{legend}"


def _bar(need: DeviceBytes, size: int | None, largest: int) -> str:
    marks = [0, *accumulate(need.by_kind.values())]
    ends = [round(_BAR * mark / largest) if largest else 0 for mark in marks]
    symbols = zip(_SYMBOLS.values(), ends, ends[1:], strict=False)
    drawn = "".join(symbol * (end - start) for symbol, start, end in symbols)
    room = round(_BAR * size / largest) if size and largest else len(drawn)
    return drawn.ljust(room, "_")


def _alternatives(plan: PlanData) -> list[list[str]]:
    """The head and a line for each way to train that was not taken."""
    rows = [["not taken", "chunks", "checkpoint", "balance", "a step", "fullest device", "why"]]
    return rows + [_alternative(plan, each) for each in plan.alternatives]


def _alternative(plan: PlanData, other: Alternative) -> list[str]:
    stages = len(other.balance)
    others = f"{plan.replicas * len(plan.sizes) // stages} × {stages} stages: " if stages != len(plan.sizes) else ""
    return [
        other.schedule, str(other.chunks), _modes(other.checkpoint), others + _listed(other.balance),
        format_seconds(other.seconds), format_bytes(other.bytes), other.reason,
    ]  # fmt: skip


def _modes(modes: Sequence[StageMode]) -> str:
    texts = [*map(shown, modes)]
    return texts[0] if len(set(texts)) == 1 else _listed(texts)


def _listed(values: Sequence[object]) -> str:
    """One by one; where they are many, each with how often it comes in a row."""
    if len(values) <= _MANY:
        return ", ".join(map(str, values))
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{value} × {count}" if count > 1 else str(value) for value, count in runs)

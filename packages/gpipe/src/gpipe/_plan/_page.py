"""A plan as a page of its own, which needs nothing from anywhere else."""

from __future__ import annotations

from profiler import html
from profiler.svg import escaped
from profiler.text import format_bytes, format_seconds

from .._template import filled
from ..timeline._svg import svg
from ._bytes import DeviceBytes
from ._data import PlanData
from ._table import alternative_rows, heading, stage_rows

COLOURS = {
    "parameters": "#4c78a8", "gradients": "#72b7b2", "optimizer": "#54a24b", "activations": "#eeca3b",
    "transient": "#f58518", "loss": "#e45756", "inputs": "#b279a2",
}  # fmt: skip


def page(plan: PlanData) -> str:
    """The report as a page: stages, memory by kind, the timeline, and alternatives."""
    return html.page(_title(plan), body(plan))


def body(plan: PlanData) -> str:
    """The HTML of the report, for a page and for notebooks."""
    setting, step = heading(plan).split("\n")
    parts = {
        "title": escaped(_title(plan)),
        "setting": escaped(setting),
        "step": escaped(step),
        "stages": html.table(stage_rows(plan), left=4),
        "memory": _memory(plan),
        "legend": " ".join(f'<span><i style="background:{c}"></i>{escaped(k)}</span>' for k, c in COLOURS.items()),
        "timeline": html.scrolling(svg([("predicted", plan.timeline)])),
        "beside": escaped(_beside(plan)),
        "others": _others(plan),
        "notes": "".join(f"<li>{escaped(note)}</li>" for note in plan.notes),
    }
    return filled(__package__, parts)


def _title(plan: PlanData) -> str:
    return f"Plan for {len(plan.layers)} layers on {plan.replicas * len(plan.sizes)} devices"


def _beside(plan: PlanData) -> str:
    """Why the timeline is not as long as the step."""
    drawn, whole = plan.timeline.makespan, plan.predicted.seconds.mid
    average = f", {format_seconds(plan.reduction)} in which replicas average their gradients,"
    included = f"the overhead of the engine{average if plan.replicas > 1 else ''} and a correction by measured steps"
    return (
        f"Actions alone: {format_seconds(drawn)}. A step is expected to take {format_seconds(whole)}: "
        f"this includes {included}, if there were any."
    )


def _others(plan: PlanData) -> str:
    (_, *head), *body = alternative_rows(plan)
    return html.table([["schedule", *head], *body], left=7) if body else "<p>Nothing else fits.</p>"


def _memory(plan: PlanData) -> str:
    largest = max([1, *(need.total for need in plan.predicted.bytes), *(size or 0 for size in plan.memory)])
    return "".join(_bar(plan, j, need, largest) for j, need in enumerate(plan.predicted.bytes))


def _bar(plan: PlanData, j: int, need: DeviceBytes, largest: int) -> str:
    parts = "".join(
        f'<i style="width:{100 * size / largest:.3f}%;background:{COLOURS[kind]}" title="{kind}: {format_bytes(size)}">'
        "</i>"
        for kind, size in need.by_kind.items()
        if size
    )
    room = plan.memory[j]
    mark = "" if room is None else f'<b style="left:{100 * room / largest:.3f}%" title="{format_bytes(room)}"></b>'
    of = "" if room is None else f" of {format_bytes(room)}"
    text = f"{j} {escaped(plan.devices[j])}: {format_bytes(need.total)}{of}"
    return f'<div class="device"><p>{text}</p><div class="bar">{parts}{mark}</div></div>'

"""Profiles as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .text import align, format_cost

if TYPE_CHECKING:
    from ._data import LayerProfile
    from ._record import Profile

_COLUMNS = {
    "forward": "forward_seconds",
    "backward": "backward_seconds",
    "inputs": "backward_input_seconds",
    "parameters": "parameter_bytes",
    "buffers": "buffer_bytes",
    "saved": "saved_bytes",
    "output": "output_bytes",
    "peak": "peak_bytes",
    "FLOPs": "flops",
}
# Peaks of layers occur at different times, and outputs are included in saved bytes.
_NOT_SUMMED = ("peak_bytes", "output_bytes")


def profile_table(profile: Profile) -> str:
    lines = [*profile, *([] if profile.loss is None else [profile.loss])]
    columns = [["layer", *(line.name for line in lines), "total"], ["type", *(line.kind for line in lines), ""]]
    for head, name in _COLUMNS.items():
        # The first part of a split backward only if it was measured.
        if name != "backward_input_seconds" or any(getattr(layer, name) is not None for layer in profile):
            columns.append([head, *_column(lines, name)])
    table = align(list(zip(*columns, strict=True)), left=2)
    return f"{_heading(profile)}\n{table}\n* the largest of its column"


def _column(lines: Sequence[LayerProfile], name: str) -> list[str]:
    values = [getattr(layer, name) for layer in lines]
    most = max((value or 0 for value in values), default=0)
    summable = None not in values and name not in _NOT_SUMMED
    cells = ["–" if value is None else "*" * (value == most != 0) + format_cost(value, name) for value in values]
    return [*cells, format_cost(sum(values), name) if summable else ""]


def _heading(profile: Profile) -> str:
    timed = f"median of {profile.rounds} rounds" if profile.rounds else "counted, not run"
    rows = f"micro-batch of {profile.rows} rows (chunks={profile.chunks})"
    return f"{len(profile)} layers on {profile.device}, {rows}, {timed}"

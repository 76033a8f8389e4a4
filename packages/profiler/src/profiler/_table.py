"""Profiles as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .text import align, format_cost

if TYPE_CHECKING:
    from ._data import LayerProfile, ProfileData

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
NOTE = "* the largest of its column"


def profile_table(profile: ProfileData) -> str:
    """A line for each layer and the loss, and one for the total; the largest figure of each column is marked."""
    return f"{heading(profile)}\n{align(profile_rows(profile), left=2)}\n{NOTE}"


def profile_rows(profile: ProfileData) -> list[list[str]]:
    """The head, a line for each layer and the loss, and the total."""
    columns = _columns(profile)
    lines = [*profile, *([] if profile.loss is None else [profile.loss])]
    largest = {column: _largest(lines, column) for column in columns.values()}
    return [["layer", "type", *columns], *(_row(layer, largest) for layer in lines), _total(lines, columns)]


def _columns(profile: ProfileData) -> dict[str, str]:
    """The figures to show; the first part of a split backward only if it was measured."""
    split = any(layer.backward_input_seconds is not None for layer in profile)
    return {head: column for head, column in _COLUMNS.items() if split or column != "backward_input_seconds"}


def heading(profile: ProfileData) -> str:
    """A line that says what was profiled, and how."""
    timed = f"median of {profile.rounds} rounds" if profile.rounds else "counted, not run"
    rows = f"micro-batch of {profile.rows} rows (chunks={profile.chunks})"
    return f"{len(profile)} layers on {profile.device}, {rows}, {timed}"


def _largest(layers: Sequence[LayerProfile], column: str) -> float | None:
    values = [getattr(layer, column) or 0 for layer in layers]
    return max(values, default=0) or None


def _row(layer: LayerProfile, largest: dict[str, float | None]) -> list[str]:
    cells = [layer.name, layer.kind]
    for column, most in largest.items():
        value = getattr(layer, column)
        mark = "*" if value == most and most is not None else ""
        cells.append("–" if value is None else mark + format_cost(value, column))
    return cells


def _total(layers: Sequence[LayerProfile], columns: dict[str, str]) -> list[str]:
    cells = ["total", ""]
    for column in columns.values():
        values = [getattr(layer, column) for layer in layers]
        # Peaks of layers occur at different times, and outputs are included in saved bytes.
        summable = None not in values and column not in ("peak_bytes", "output_bytes")
        cells.append(format_cost(sum(values), column) if summable else "")
    return cells

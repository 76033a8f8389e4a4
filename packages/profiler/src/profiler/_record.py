""":class:`Profile`: measured costs, as text or JSON, and interpolated to other micro-batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import SupportsIndex

from . import documents
from ._data import FIGURES, LayerProfile, between
from .text import align, format_cost

COSTS = ("seconds", "parameter_bytes", *FIGURES)
SCHEMA = "gpipe-profiler/3"

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


@dataclass(frozen=True)
class Profile:
    """The layers of a model in order, and how they were profiled.

    `str()` returns a table. Index a profile with a position or a name.

    layers: the costs of each layer.
    device: the device of the measurement, or ``meta``.
    torch: the version of PyTorch.
    threads: the number of intra-op threads on the CPU.
    chunks: the number of micro-batches that the sample was split into.
    rows: the number of rows of the measured micro-batch.
    rounds: the number of timed rounds; 0 on ``meta``.
    loss: the cost of the loss, as a layer; None if no loss was given.
    others: profiles of the same layers with fewer rows, in ascending order.
    """

    layers: tuple[LayerProfile, ...]
    device: str
    torch: str
    threads: int
    chunks: int
    rows: int
    rounds: int
    loss: LayerProfile | None = None
    others: tuple[Profile, ...] = ()

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerProfile]:
        return iter(self.layers)

    def __getitem__(self, layer: SupportsIndex | str) -> LayerProfile:
        if not isinstance(layer, str):
            return self.layers[layer]
        if layer not in self.names:
            raise KeyError(f"no layer {layer!r} in this profile; choose one of {', '.join(self.names)}")
        return self.layers[self.names.index(layer)]

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    @property
    def seconds(self) -> list[float]:
        """The seconds of forward plus backward of each layer."""
        return self.costs("seconds")

    def costs(self, by: str) -> list[float]:
        """Return one kind of cost of every layer, such as ``"seconds"``, ``"saved_bytes"`` or ``"flops"``.

        Args:
            by: the name of the cost, a field or property of :class:`LayerProfile`.

        Returns:
            A number per layer, in seconds, bytes or operations.

        Raises:
            ValueError: ``by`` is unknown, or was not measured.
        """
        if by not in COSTS:
            raise ValueError(f"by: expected one of {', '.join(COSTS)}, got {by!r}")
        costs = [getattr(layer, by) for layer in self.layers]
        if None in costs:
            raise ValueError(f"by: this profile has no {by}, because it was measured on device {self.device!r}")
        return costs

    def at(self, rows: int) -> Profile:
        """Interpolate the profile to a micro-batch of `rows` rows, between the two nearest measured sizes.

        Args:
            rows: the number of rows of a micro-batch, at least 1.

        Returns:
            A profile whose `others` is empty.

        Raises:
            ValueError: `rows` is below 1, or differs from the only measured size.
        """
        if rows < 1:
            raise ValueError(f"rows: expected at least 1, got {rows}")
        measured = [*self.others, self]
        for each in measured:
            if each.rows == rows:
                return replace(each, others=())
        if not self.others:
            raise ValueError(
                f"rows: this profile was measured only with {self.rows} rows, got {rows}; "
                f"measure two sizes: profile(..., rows=[{min(rows, self.rows)}, {max(rows, self.rows)}])"
            )
        # Choose the first pair with an upper end above `rows`; extrapolate from the last pair otherwise.
        pairs = list(pairwise(measured))
        low, high = next((pair for pair in pairs if pair[1].rows > rows), pairs[-1])
        share = (rows - low.rows) / (high.rows - low.rows)
        return replace(
            high,
            layers=tuple(between(a, b, share) for a, b in zip(low.layers, high.layers, strict=True)),
            loss=between(low.loss, high.loss, share) if low.loss and high.loss else None,
            rows=rows,
            chunks=max(1, round(high.chunks * high.rows / rows)),
            rounds=min(low.rounds, high.rounds),
            others=(),
        )

    def __str__(self) -> str:
        return _table(self)

    def to_json(self) -> str:
        """Serialize the profile.

        Returns:
            JSON that `from_json` turns into an equal profile.
        """
        return documents.dump(self, SCHEMA)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Load a profile from the output of `to_json`.

        Args:
            text: JSON.

        Returns:
            An equal profile.

        Raises:
            ValueError: `text` is not the JSON of a profile. The message contains the path of the first error.
        """
        profile = documents.load(Profile, text, "profile", SCHEMA)
        _expect_whole([*profile.others, profile])
        return profile


def _expect_whole(profiles: list[Profile]) -> None:
    for each in profiles:
        if not each.names or len(set(each.names)) < len(each.names):
            raise ValueError("layers: expected at least one layer, with distinct names")
    for fewer, more in pairwise(profiles):
        if _form(fewer) != _form(more) or fewer.rows >= more.rows or fewer.others:
            raise ValueError("others: expected profiles of the same layers with fewer rows, in ascending order")


def _form(profile: Profile) -> tuple[object, ...]:
    return profile.names, profile.loss is None


def _table(profile: Profile) -> str:
    lines = [*profile, *([] if profile.loss is None else [profile.loss])]
    columns = [["layer", *(line.name for line in lines), "total"], ["type", *(line.kind for line in lines), ""]]
    for head, name in _COLUMNS.items():
        # Show the first part of a split backward only if it was measured.
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

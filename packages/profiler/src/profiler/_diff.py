"""The differences between two profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ._data import COSTS, LayerProfile, ProfileData
from .text import align, format_bytes, format_flops, format_seconds


@dataclass(frozen=True)
class LayerChange:
    """A layer before and after; None on a side that has no layer of this name."""

    name: str
    before: LayerProfile | None
    after: LayerProfile | None

    def ratio(self, by: str) -> float | None:
        """The figure `by` after, divided by that before; None if a side lacks it, or it was 0.

        Args:
            by: the name of a figure, as for :meth:`Profile.costs`.

        Returns:
            The ratio, or None.

        Raises:
            ValueError: there is no figure of this name.
        """
        if by not in COSTS:
            raise ValueError(f"by: expected one of {', '.join(COSTS)}, got {by!r}")
        if self.before is None or self.after is None:
            return None
        before, after = getattr(self.before, by), getattr(self.after, by)
        return after / before if before and after is not None else None


@dataclass(frozen=True)
class ProfileDiff:
    """The changes of all layers: those of the first profile in order, then those that only the second has."""

    changes: tuple[LayerChange, ...]

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[LayerChange]:
        return iter(self.changes)

    def __getitem__(self, name: str) -> LayerChange:
        for change in self.changes:
            if change.name == name:
                return change
        raise KeyError(f"no layer {name!r} in either profile")

    @property
    def added(self) -> list[str]:
        return [change.name for change in self.changes if change.before is None]

    @property
    def removed(self) -> list[str]:
        return [change.name for change in self.changes if change.after is None]

    def __str__(self) -> str:
        return diff_table(self)


def diff(before: ProfileData, after: ProfileData) -> ProfileDiff:
    olds = {layer.name: layer for layer in before}
    news = {layer.name: layer for layer in after}
    return ProfileDiff(tuple(LayerChange(name, olds.get(name), news.get(name)) for name in {**olds, **news}))


def diff_table(diff: ProfileDiff) -> str:
    """A line for each layer: seconds and saved and parameter bytes, before → after."""
    head = ["layer", "type", "seconds", "", "saved", "", "parameters", "", "FLOPs", ""]
    return align([head, *(_change_row(change) for change in diff)], left=2)


def _change_row(change: LayerChange) -> list[str]:
    kinds = [layer.kind for layer in (change.before, change.after) if layer is not None]
    cells = [change.name, " → ".join(dict.fromkeys(kinds))]
    formats: dict[str, Callable[[float], str]] = {
        "seconds": format_seconds,
        "saved_bytes": format_bytes,
        "parameter_bytes": format_bytes,
        "flops": format_flops,
    }
    for by, format_ in formats.items():
        cells += _change_cells(change, by, format_)
    return cells


def _change_cells(change: LayerChange, by: str, format_: Callable[[float], str]) -> list[str]:
    def shown(layer: LayerProfile | None) -> str:
        value = None if layer is None else getattr(layer, by)
        return "–" if value is None else format_(value)

    ratio = change.ratio(by)
    return [f"{shown(change.before)} → {shown(change.after)}", "" if ratio is None else f"×{ratio:.2f}"]

"""Two profiles side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ._record import COSTS, LayerProfile, Profile
from ._table import diff_table


@dataclass(frozen=True)
class LayerChange:
    """A layer before and after; None on the side where no layer has this name."""

    name: str
    before: LayerProfile | None
    after: LayerProfile | None

    def ratio(self, by: str) -> float | None:
        """After ÷ before of the figure `by`; None where a side lacks it or it was 0.

        Args:
            by: the name of a figure, as of :meth:`Profile.costs`.

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


def diff(before: Profile, after: Profile) -> ProfileDiff:
    olds = {layer.name: layer for layer in before}
    news = {layer.name: layer for layer in after}
    return ProfileDiff(tuple(LayerChange(name, olds.get(name), news.get(name)) for name in {**olds, **news}))

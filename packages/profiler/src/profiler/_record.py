"""What a profile found, and what can be done with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._data import ProfileData
from ._diff import ProfileDiff, diff
from ._json import dump, load
from ._rows import at
from ._table import profile_table


@dataclass(frozen=True)
class Profile(ProfileData):
    """The layers of a Sequential in order, and under which conditions they were profiled.

    `str()` is a table.  Indexing takes a position or a name.

    device: where it ran, or ``meta`` where nothing ran.
    torch: the version of PyTorch.
    threads: of one operation on the CPU.
    chunks: into how many micro-batches the sample was cut.
    rows: of the one that was used.
    rounds: how many times each layer was timed.
    loss: what the loss costs, as if it were a layer behind the last; None if none was given.
    others: the same layers with fewer rows, in ascending order.
    skips: the tensors that skip layers.
    """

    others: tuple[Profile, ...] = ()

    def at(self, rows: int) -> Profile:
        """What a micro-batch of `rows` rows costs: each figure on the line through the two nearest that were measured.

        Costs have a part that does not depend on rows, so that figures in proportion to them are off by as much.

        Args:
            rows: of a micro-batch, at least 1.

        Returns:
            A profile without others.

        Raises:
            ValueError: only one number of rows was measured, or `rows` is below 1.
        """
        return at([*self.others, self], rows)

    def __str__(self) -> str:
        return profile_table(self)

    def _repr_html_(self) -> str:
        from ._html import shown  # late, as below

        return shown(self)

    def to_json(self) -> str:
        """Text that `from_json` reads back as an equal profile.

        Returns:
            JSON.
        """
        return dump(self)

    @staticmethod
    def from_json(text: str) -> Profile:
        """The profile that `to_json` wrote.

        Args:
            text: JSON.

        Returns:
            An equal profile.

        Raises:
            ValueError: `text` is anything else; names the place.
        """
        return load(Profile, text)

    def diff(self, other: Profile) -> ProfileDiff:
        """What changed from this profile to `other`, layer by layer.

        Args:
            other: a profile of the same layers, or of some of them.

        Returns:
            The changes; `str()` of them is a table.
        """
        return diff(self, other)

    def picture(self, balance: Sequence[int] | None = None, *, by: str = "seconds") -> str:
        """An SVG with a bar for each layer; given a balance, also the cuts, and above each partition its load.

        Args:
            balance: how many layers each partition has.
            by: the name of the figure that bars show.

        Returns:
            The text of the picture.

        Raises:
            ValueError: a balance of more or fewer layers, or a figure that was not measured.
        """
        from ._picture import picture  # late: it needs XML, which torch alone does not import

        return picture(self, balance, by)

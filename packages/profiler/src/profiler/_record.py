""":class:`Profile`: the result of a measurement, and its methods."""

from __future__ import annotations

from dataclasses import dataclass

from ._data import ProfileData
from ._json import dump, load
from ._rows import at
from ._table import profile_table


@dataclass(frozen=True)
class Profile(ProfileData):
    """The layers of a model in order, and how they were profiled.

    `str()` is a table. An index is a position or a name.

    device: the device that was measured on, or ``meta``.
    torch: the version of PyTorch.
    threads: the number of intra-op threads on the CPU.
    chunks: the number of micro-batches that the sample was cut into.
    rows: the rows of the micro-batch that was measured.
    rounds: the number of times that each layer was timed.
    loss: the cost of the loss, as of a layer; None if no loss was given.
    others: the same layers with fewer rows, in ascending order.
    skips: the tensors that skip layers.
    """

    others: tuple[Profile, ...] = ()

    def at(self, rows: int) -> Profile:
        """The profile of a micro-batch of `rows` rows, by linear interpolation between the two nearest that were
        measured.

        This is more accurate than costs in proportion to rows, since a part of the cost does not depend on rows.

        Args:
            rows: the rows of a micro-batch, at least 1.

        Returns:
            A profile whose `others` is empty.

        Raises:
            ValueError: only one number of rows was measured, or `rows` is below 1.
        """
        return at([*self.others, self], rows)

    def __str__(self) -> str:
        return profile_table(self)

    def _repr_html_(self) -> str:
        from html import escape  # late, as few need it

        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """Text that `from_json` turns into an equal profile.

        Returns:
            JSON.
        """
        return dump(self)

    @staticmethod
    def from_json(text: str) -> Profile:
        """The profile whose `to_json` returned `text`.

        Args:
            text: JSON.

        Returns:
            An equal profile.

        Raises:
            ValueError: `text` is not the JSON of a profile; the message names the place.
        """
        return load(Profile, text)

"""A profile as notebooks show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._picture import picture
from ._table import NOTE, heading, profile_rows
from .html import fragment, scrolling, table
from .svg import escaped

if TYPE_CHECKING:
    from ._data import ProfileData


def shown(profile: ProfileData) -> str:
    """The picture, of seconds where they were measured and else of FLOPs, above the table."""
    timed = all(layer.seconds is not None for layer in profile)
    chart = scrolling(picture(profile, None, "seconds" if timed else "flops"))
    note = f'<p class="faint">{NOTE}</p>'
    return fragment(f"<p>{escaped(heading(profile))}</p>{chart}{table(profile_rows(profile), left=2)}{note}")

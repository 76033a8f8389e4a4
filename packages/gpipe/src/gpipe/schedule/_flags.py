"""How a stage is checkpointed: by one mode, or by a flag for each of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

StageMode = str | tuple[bool, ...]
"""A mode for the whole stage, or a flag for each of its layers: whether it is recomputed."""


def mode_of(flags: Iterable[bool]) -> StageMode:
    """The mode that is equivalent to these flags, or the flags if there is none.

    >>> mode_of([True, True]), mode_of([True, False])
    ('always', (True, False))
    """
    found = tuple(flags)
    return "always" if all(found) else found if any(found) else "never"


def scheduled(mode: str | Sequence[bool]) -> str:
    """The mode for schedules, which recompute whole stages; single layers are recomputed inside the stage's backward.

    >>> scheduled("except_last"), scheduled([True, True]), scheduled([True, False])
    ('except_last', 'always', 'never')
    """
    return mode if isinstance(mode, str) else "always" if all(mode) else "never"


def runs_of(flags: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    """The runs of layers with the same flag: that flag, the first layer, and the end.

    >>> list(runs_of([False, True, True]))
    [(False, 0, 1), (True, 1, 3)]
    """
    end = 0
    for flag, run in groupby(flags):
        first, end = end, end + len(list(run))
        yield flag, first, end

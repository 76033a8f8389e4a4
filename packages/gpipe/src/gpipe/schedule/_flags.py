"""How a stage is checkpointed: by one mode, or by a flag for each of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

StageMode = str | tuple[bool, ...]
"""A mode of the whole stage, or for each of its layers whether it is computed again."""

StageCheckpoint = str | Sequence[bool]
"""The same, as users give it."""

Checkpoint = str | Sequence[StageCheckpoint]
"""As of :class:`gpipe.GPipe`: a mode for all stages, or for each what it has."""


def expect_flags(flags: Iterable[object], name: str) -> None:
    """Raise TypeError for a flag of ``name`` that is neither True nor False."""
    for k, flag in enumerate(flags):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}[{k}] must be True or False: whether that layer is checkpointed; got {flag!r}")


def mode_of(flags: Iterable[bool]) -> StageMode:
    """These flags, or the mode that says the same.

    >>> mode_of([True, True]), mode_of([True, False])
    ('always', (True, False))
    """
    found = tuple(flags)
    return "always" if all(found) else found if any(found) else "never"


def scheduled(mode: StageCheckpoint) -> str:
    """What schedules see: they recompute stages, not layers, so that those are computed again inside of backwards.

    >>> scheduled("except_last"), scheduled([True, True]), scheduled([True, False])
    ('except_last', 'always', 'never')
    """
    return mode if isinstance(mode, str) else "always" if all(mode) else "never"


def as_lists(modes: Iterable[StageCheckpoint]) -> list[str | list[bool]]:
    """As :class:`gpipe.GPipe` shows them: in lists that are the caller's own."""
    return [each if isinstance(each, str) else list(each) for each in modes]


def runs_of(flags: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    """The runs of layers with the same flag: that flag, the first layer, and the end.

    >>> list(runs_of([False, True, True]))
    [(False, 0, 1), (True, 1, 3)]
    """
    end = 0
    for flag, run in groupby(flags):
        first, end = end, end + len(list(run))
        yield flag, first, end


def moved(modes: Sequence[StageCheckpoint], before: Sequence[int], after: Sequence[int]) -> list[StageMode]:
    """What stages have once they are of other sizes: flags follow their layers, and modes stay with their stages.

    So a stage with a mode has it for layers that come from another one with a mode. It has flags itself once a layer
    comes with one that says something else than its mode.

    Args:
        modes: of the stages.
        before, after: their layers.

    >>> moved([[True, False], "never"], [2, 1], [1, 2]), moved([[False, True], "never"], [2, 1], [1, 2])
    (['always', 'never'], ['never', (True, False)])
    """
    layers, ends = _layers(modes, before), accumulate(after)
    return [_mode_on(layers[end - size : end], mode) for mode, size, end in zip(modes, after, ends, strict=True)]


def extended(modes: Sequence[StageCheckpoint], sizes: Sequence[int]) -> list[StageMode]:
    """What each stage would have if it was given all layers, of which :func:`moved` gives it some.

    >>> extended(["always", (True, False)], [1, 2])
    [(True, True, False), (True, True, False)]
    """
    layers = _layers(modes, sizes)
    return [_mode_on(layers, mode) for mode in modes]


Layer = tuple[bool | None, bool]
"""The flag of a layer, if it has one, and whether it is computed again: by that, or by the mode of its stage."""


def _layers(modes: Sequence[StageCheckpoint], sizes: Sequence[int]) -> list[Layer]:
    found: list[Layer] = []
    for mode, size in zip(modes, sizes, strict=True):
        found += [(None, mode != "never")] * size if isinstance(mode, str) else [(flag, flag) for flag in mode]
    return found


def _mode_on(layers: Sequence[Layer], mode: StageCheckpoint) -> StageMode:
    """What a stage has on these layers that had ``mode``."""
    if not isinstance(mode, str):
        return mode_of(again for _, again in layers)
    if all(flag is None for flag, _ in layers):
        return mode
    return mode_of(mode != "never" if flag is None else flag for flag, _ in layers)

"""Schedules by their names, as people ask for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from .._meant import did_you_mean
from ._builders import fill_drain, interleaved, one_forward_one_backward, zero_bubble
from ._schedule import Schedule


def named(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: int = 0,
    split: Collection[int] | None = None,
) -> Schedule:
    """The schedule called ``name``, in capitals or not, for stages on the workers of ``placement``.

    Args:
        split: under ``"zero_bubble"``, the stages whose backward runs in two parts; all by default.

    Raises ValueError, with the list of names, if there is none.
    """
    expect_name(name, SCHEDULES)
    if name.lower() == "zero_bubble":
        return zero_bubble(microbatches, len(placement), checkpoint_stop, split)
    return SCHEDULES[name.lower()](microbatches, placement, checkpoint_stop)


def expect_name(name: str, names: Iterable[str]) -> None:
    """Raise ValueError, with the list of ``names``, unless ``name``, in capitals or not, is one of them."""
    names = list(names)
    if name.lower() not in names:
        raise ValueError(
            f"there is no schedule {name!r}; choose one of {', '.join(map(repr, names))}" + did_you_mean(name, names)
        )


def _looped(microbatches: int, placement: Sequence[int], checkpoint_stop: int) -> Schedule:
    workers = len(set(placement))
    if list(placement) != [j % workers for j in range(len(placement))]:
        raise ValueError(
            f"interleaving takes the workers in turn, as in devices=[0, 1, 0, 1]; these stages are on workers "
            f"{list(placement)}"
        )
    return interleaved(microbatches, len(placement), workers, checkpoint_stop)


def _plain(make: Callable[[int, int, int], Schedule]) -> Callable[[int, Sequence[int], int], Schedule]:
    return lambda microbatches, placement, stop: make(microbatches, len(placement), stop)


SCHEDULES: dict[str, Callable[[int, Sequence[int], int], Schedule]] = {
    "fill_drain": _plain(fill_drain),
    "1f1b": _plain(one_forward_one_backward),
    "interleaved": _looped,
    "zero_bubble": _plain(zero_bubble),
}

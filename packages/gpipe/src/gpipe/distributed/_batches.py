"""Read mini-batches on one rank of a pipe, and send them to the ranks that need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ._calls import read_on_first
from ._rank import Rank


def broadcast_batches(loader: Iterable[Any] | None, rank: Rank) -> Iterator[Any]:
    """Iterate, on all ranks of a pipe, over the mini-batches that the rank of the first stage reads.

    All ranks iterate together. Only the rank of the first stage, which is ``rank.ranks[0]``, reads: its workers, its
    random numbers and its sampler decide which rows there are. Ranks that need no data get None in place of each
    tensor. With replicas, each pipe reads its own rows.

    Args:
        loader: the mini-batches, such as a ``DataLoader``: trees of tensors and of values that can be pickled. Used on
            the rank of the first stage only; the others may pass None.
        rank: the ranks of the pipe.

    Yields:
        Each mini-batch: on the rank of the first stage as it was read; on the rank of the last stage, or on all ranks
        of a model with a custom forward, a copy on the CPU; on other ranks None in place of each tensor.

    Raises:
        TypeError: ``loader`` is None on the rank of the first stage.
        ValueError: ranks call different methods. Raised on every rank.
        RemoteError: the rank of the first stage failed to read.
        LostRankError: another rank has exited or does not respond.

    >>> for x, y in broadcast_batches(loader, rank):  # doctest: +SKIP
    ...     loss = rank.step(x, y, loss_fn=loss_fn)
    """
    batches: list[Iterator[Any]] = []

    def read() -> list[Any]:
        if not batches:
            batches.append(_iterator(loader))
        return [*islice(batches[0], 1)]

    while found := read_on_first(rank, "broadcast_batches", read):
        yield found[0]


def _iterator(loader: Iterable[Any] | None) -> Iterator[Any]:
    if loader is None:
        raise TypeError("loader is None on the rank of the first stage, which reads the mini-batches of all ranks")
    return iter(loader)

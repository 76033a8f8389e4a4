"""Read mini-batches on one rank of a pipe, and send them to the ranks that need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from microbatch import map_tensors

from ._agreement import METHOD
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
    processes, batches = rank._processes, None
    reader = processes.ranks[0]
    readers = rank._readers()
    while True:
        batch: Any = None
        report: dict[str, Any] = {}
        with processes.opening() as found:
            found.alike = {METHOD: "broadcast_batches"}
            if processes.me == reader:
                batches = batches if batches is not None else _iterator(loader)
                for batch in batches:
                    report = {"batch": map_tensors(_none, batch)}
                    break
        told = processes.closing(report)[reader]
        if "batch" not in told:
            return
        yield _sent(rank, batch, told["batch"], readers)


def _iterator(loader: Iterable[Any] | None) -> Iterator[Any]:
    if loader is None:
        raise TypeError("loader is None on the rank of the first stage, which reads the mini-batches of all ranks")
    return iter(loader)


def _sent(rank: Rank, batch: Any, empty: Any, readers: set[int]) -> Any:
    """Return the mini-batch: ``batch`` on the rank that has it, a copy on the ``readers``, and ``empty`` on others."""
    processes = rank._processes
    if processes.me == processes.ranks[0]:
        processes.spread(map_tensors(_on_host, batch), readers)
        return batch
    return processes.spread(None, readers) if processes.me in readers else empty


def _none(tensor: Tensor) -> None:
    return None


def _on_host(tensor: Tensor) -> Tensor:
    # A pickled view would contain all of its storage, such as the full dataset.
    return tensor.detach().clone().cpu()

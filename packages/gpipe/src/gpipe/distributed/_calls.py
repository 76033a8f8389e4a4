"""Calls that all ranks of a pipe make together, other than steps. Each is announced, so that a mismatch is an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from microbatch import map_tensors

from ._agreement import METHOD
from ._deferred_signals import allow_signals, defer_signals
from ._errors import LostRankError
from ._groups import Group
from ._norm import norm_over
from ._processes import RankProcesses
from ._replicas import Replicas


class Connected(Protocol):
    """What these calls use of a rank."""

    _processes: RankProcesses
    _replicas: Replicas
    _members: tuple[int, ...]
    _group: Group | None
    _devices: list[torch.device]

    def _readers(self) -> set[int]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


@defer_signals()
def announce(rank: Connected, method: str, check: Callable[[Sequence[int]], None] = lambda members: None) -> None:
    """Begin a ``method`` that all ranks and replicas call together. ValueError on all if one calls another one.

    Args:
        check: called with the global ranks of the pipe. If it raises an error on one rank, all ranks raise.
    """
    if not rank._processes.is_open:  # a checkpoint may still be saved, without these connections
        check(rank._members)
        return
    with rank._processes.begin_call() as found, allow_signals():
        found.must_match = {METHOD: method}
        check(rank._members)
    rank._processes.end_call({})
    rank._replicas.announce(method)


def announce_new(members: Sequence[int]) -> None:
    """Announce to the last rank of the same ``members`` that this one creates a new one. ValueError if it is in a call.

    A member that is only late creates its new rank later, and then announces it, too.
    """
    for rank in _latest(lambda rank: rank._members == tuple(members)):
        with suppress(LostRankError):  # it was closed on another member, whose last rank is an earlier one
            with rank._processes.begin_call() as found:
                found.must_match = {METHOD: "Rank"}
            rank._processes.end_call({})
            return


def announce_new_replica(members: Sequence[int]) -> None:
    """Announce a new rank to the replicas of the last one; see :func:`announce_new`."""
    for rank in _latest(lambda rank: rank._replicas.meeting.groups.members == tuple(members)):
        with suppress(LostRankError):
            rank._replicas.announce("Rank")
            return


def _latest(fits: Callable[[Connected], bool]) -> list[Connected]:
    """Return the ranks of this process that are connected and ``fit``, the last one first."""
    return [rank for _, rank in sorted(_created.items(), reverse=True) if rank._processes.is_open and fits(rank)]


def register(rank: Connected) -> None:
    """Remember a new rank, which later ones are announced to."""
    _created[next(_numbers)] = rank


_numbers = itertools.count()
_created: WeakValueDictionary[int, Connected] = WeakValueDictionary()


@defer_signals()
def read_on_first(rank: Connected, method: str, read: Callable[[], Any]) -> Any:
    """Call ``read`` on the rank of the first stage, and return its result on all ranks, which call this together.

    Ranks that need the tensors of mini-batches get copies on the CPU. Other ranks get None in place of each tensor.
    """
    processes, readers = rank._processes, rank._readers()
    first, me = processes.ranks[0], processes.me
    value: Any = None
    with processes.begin_call() as found, allow_signals():
        found.must_match = {METHOD: method}
        if me == first:
            value = read()
    empty = processes.end_call({"value": map_tensors(lambda tensor: None, value)} if me == first else {})[first][
        "value"
    ]
    if me == first:
        # A pickled view would contain all of its storage, such as the full dataset.
        processes.spread(map_tensors(lambda tensor: tensor.detach().clone().cpu(), value), readers)
        return value
    return processes.spread(None, readers) if me in readers else empty


@defer_signals()
def gradient_norm(rank: Connected, method: str) -> Tensor:
    """Return the 2-norm of the gradients of all ranks, which call this in the same ``method``."""
    with rank._processes.begin_call() as found, allow_signals():
        found.must_match = {METHOD: method}
    others = rank._processes.tied.of_others()
    own = [p.grad for p in rank.parameters() if p.grad is not None and p not in others]
    return norm_over(rank._group, rank._processes.end_call, own, rank._devices[0])

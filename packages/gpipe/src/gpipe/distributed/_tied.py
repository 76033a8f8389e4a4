"""Parameters that stages on several ranks have: each rank keeps one of its own, and they stay alike.

The first rank that has one, by its stages, gives the others its value when the pipe is made. At the end of a step the
gradients go to that rank, which adds them, and the sum comes back. So optimizers that do the same everywhere change all
of them in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine._accumulate import added
from ..engine._parameters import parameters_of
from ..engine._tied import modules_below, shared_tensors
from ._groups import Groups
from ._messages import Peer, Receiver, Sender


class Twin(NamedTuple):
    """A tensor of this rank that others have too.

    Attributes:
        number: among all of the model.
        members: who has one, in the order of their first stages.
        module, name: where it is.
    """

    number: int
    members: tuple[int, ...]
    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """The tensor, which may have been moved since it was found."""
        found: Tensor = getattr(self.module, self.name)
        return found


def twins_of(partitions: Sequence[nn.Module], ranks: Sequence[int], me: int) -> list[Twin]:
    """The parameters and buffers of rank ``me`` that stages on other ranks have too.

    Args:
        partitions: of all stages, while all of them are one model.
        ranks: that of each.
    """
    parts = [modules_below(partition) for partition in partitions]
    shared = shared_tensors(parts)
    holders: dict[int, dict[int, tuple[nn.Module, str]]] = {}
    for rank, modules in zip(ranks, parts, strict=True):
        for module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if id(tensor) in shared:
                    holders.setdefault(id(tensor), {}).setdefault(rank, (module, name))
    crossing = [each for each in holders.values() if len(each) > 1]
    return [Twin(k, tuple(each), *each[me]) for k, each in enumerate(crossing) if me in each]


class Twins:
    """Keeps them alike.

    Args:
        found: those of this rank.
        groups: the ranks, and over what they talk.
        tag: the first that is free for their messages.
    """

    def __init__(self, found: Sequence[Twin], groups: Groups, tag: int) -> None:
        self._owned = [twin for twin in found if twin.members[0] == groups.me]
        self._others = [twin for twin in found if twin.members[0] != groups.me]
        self._ways: dict[tuple[int, int], _Way] = {}
        for twin in found:
            to_owner, back = tag + 2 * twin.number, tag + 2 * twin.number + 1
            for k in twin.members[1:] if twin in self._owned else twin.members[:1]:
                out, into = (back, to_owner) if twin in self._owned else (to_owner, back)
                self._ways[twin.number, k] = _Way(groups, k, out, into)

    def spread_values(self) -> None:
        """Let all have the values of the owner."""
        for twin in self._owned:
            for k in twin.members[1:]:
                self._ways[twin.number, k].put(twin.tensor.detach())
        with torch.no_grad():
            for twin in self._others:
                value = self._ways[twin.number, twin.members[0]].get()
                assert value is not None
                twin.tensor.copy_(value)
        self._flush()

    def trained(self, module: nn.Module) -> list[Tensor]:
        """Those below ``module`` whose gradients are parts of a sum."""
        twins = [twin.tensor for twin in (*self._owned, *self._others)]
        below = {*parameters_of(module)} if twins else set()
        return [tensor for tensor in twins if tensor.requires_grad and tensor in below]

    def summed(self, grown: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """``grown``, the gradients of leaves in a run, where those of twins are sums over all ranks."""
        found = dict(grown)
        for twin in self._others:
            self._ways[twin.number, twin.members[0]].put(found.pop(twin.tensor, None))
        for twin in self._owned:
            ways = [self._ways[twin.number, k] for k in twin.members[1:]]
            parts = [found.pop(twin.tensor, None), *[way.get() for way in ways]]
            whole = reduce(_sum, parts)
            found |= {} if whole is None else {twin.tensor: whole}
            for way in ways:
                way.put(whole)
        for twin in self._others:
            whole = self._ways[twin.number, twin.members[0]].get()
            found |= {} if whole is None else {twin.tensor: whole.to(twin.tensor.device)}
        self._flush()
        return found

    def _flush(self) -> None:
        for way in self._ways.values():
            way.sender.flush()


class _Way:
    """To one of the other ranks and back, for one tensor."""

    def __init__(self, groups: Groups, member: int, out: int, into: int) -> None:
        self.sender = Sender(Peer(groups.values, member, out))
        self._receiver = Receiver(Peer(groups.values, member, into), torch.device("cpu"))

    def put(self, tensor: Tensor | None) -> None:
        self.sender.put(0, [tensor])

    def get(self) -> Tensor | None:
        self._receiver.expect(1)
        payload: Any = self._receiver.get()[2]
        found: Tensor | None = payload[0]
        return found


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return added(a, b.to(a.device))

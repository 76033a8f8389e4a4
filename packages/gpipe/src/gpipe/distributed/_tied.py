"""Parameters that stages on several ranks share: each rank has a copy of its own, and the copies stay equal.

When the pipe is made, the rank with the first stage that has a parameter sends its value to the others. At the end of a
step the gradients are sent to that rank, which adds them and sends the sum back. So equal optimizers change all copies
in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine._accumulate import added
from ..engine._parameters import parameters_of
from ..engine._tied import modules_below, shared_tensors
from ._crossings import Crossing
from ._wires import Wires


class Twin(NamedTuple):
    """A tensor of this rank that other ranks have too.

    Attributes:
        number: its number among all such tensors of the model.
        members: the ranks that have it, in the order of their first stages.
        module, name: the module that holds it here, and its name there.
    """

    number: int
    members: tuple[int, ...]
    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """The tensor; looked up each time, since the module may have been moved."""
        found: Tensor = getattr(self.module, self.name)
        return found


def twins_of(
    partitions: Sequence[nn.Module], ranks: Sequence[int], me: int
) -> tuple[list[Twin], list[tuple[int, int]]]:
    """The parameters and buffers of rank ``me`` that stages on other ranks have too.

    Args:
        partitions: the partitions of all stages, before any is moved.
        ranks: the rank of each.

    Returns:
        These tensors; and for each pair of ranks that send such tensors to each other, of all ranks, a stage of each
        that has one.
    """
    parts = [modules_below(partition) for partition in partitions]
    shared = shared_tensors(parts)
    holders: dict[int, dict[int, tuple[int, nn.Module, str]]] = {}
    for stage, (rank, modules) in enumerate(zip(ranks, parts, strict=True)):
        for module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if id(tensor) in shared:
                    holders.setdefault(id(tensor), {}).setdefault(rank, (stage, module, name))
    crossing = [each for each in holders.values() if len(each) > 1]
    twins = [Twin(k, tuple(each), *each[me][1:]) for k, each in enumerate(crossing) if me in each]
    ties: dict[frozenset[int], tuple[int, int]] = {}
    for each in crossing:
        owner, *others = each
        for k in others:
            ties.setdefault(frozenset((owner, k)), (each[owner][0], each[k][0]))
    return twins, [*ties.values()]


class Twins:
    """Keeps the copies of shared tensors equal.

    Args:
        found: the tensors of this rank.
        me: the number of this rank.
        crossings: the channels to the ranks that share any of them.
        wires: the connections between accelerators that these may use.
    """

    def __init__(self, found: Sequence[Twin], me: int, crossings: Iterable[Crossing], wires: Wires) -> None:
        self._owned = [twin for twin in found if twin.members[0] == me]
        self._others = [twin for twin in found if twin.members[0] != me]
        self._ways = {crossing.member: Way(crossing) for crossing in crossings}
        self._wires = wires

    @property
    def are_there(self) -> bool:
        """Whether this rank shares any tensors."""
        return bool(self._ways)

    def of_others(self) -> set[Tensor]:
        """The tensors of this rank that another one has before."""
        return {twin.tensor for twin in self._others}

    def spread_values(self) -> None:
        """Send the values of the first rank that has each tensor to the others."""
        for twin in self._owned:
            for k in twin.members[1:]:
                self._ways[k].put(twin.tensor.detach())
        with torch.no_grad():
            for twin in self._others:
                value = self._ways[twin.members[0]].get()
                assert value is not None
                twin.tensor.copy_(value)
        self._flush()

    def trained(self, module: nn.Module) -> list[Tensor]:
        """The leaves in ``module`` whose gradients have to be summed over ranks."""
        twins = [twin.tensor for twin in (*self._owned, *self._others)]
        below = {*parameters_of(module)} if twins else set()
        return [tensor for tensor in twins if tensor.requires_grad and tensor in below]

    def summed(self, grown: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """``grown``, the gradients of leaves in a run, with those of shared leaves summed over all ranks.

        All ranks handle the tensors in the same order, and send their parts before they receive sums: so messages
        between two ranks are read in the order in which they were sent.
        """
        found = dict(grown)
        for twin in self._others:
            self._ways[twin.members[0]].put(found.pop(twin.tensor, None))
        sums: list[tuple[Tensor, Tensor | None]] = []
        for twin in self._owned:
            ways = [self._ways[k] for k in twin.members[1:]]
            sums.append((twin.tensor, reduce(_sum, [found.pop(twin.tensor, None), *[way.get() for way in ways]])))
            for way in ways:
                way.put(sums[-1][1])
        sums += [(twin.tensor, self._ways[twin.members[0]].get()) for twin in self._others]
        self._flush()
        return found | {tensor: whole.to(tensor.device) for tensor, whole in sums if whole is not None}

    def _flush(self) -> None:
        """Wait until everything that was sent has been received, also by devices: nothing else checks that."""
        for way in self._ways.values():
            way.flush()
        if self._ways:
            self._wires.settle()


class Way:
    """Sends tensors to one other rank, and receives them.

    Args:
        crossing: the channel between the two.
    """

    def __init__(self, crossing: Crossing) -> None:
        self._sender, self._receiver = crossing.sender, crossing.receiver

    def put(self, tensor: Tensor | None) -> None:
        """Start to send ``tensor``."""
        self._sender.put(0, [tensor])

    def get(self) -> Tensor | None:
        """Wait for the next tensor; if it goes from device to device, until the transfer is queued."""
        self._receiver.expect(1)
        payload: Any = self._receiver.get()[2]
        found: Tensor | None = payload[0]
        return found

    def flush(self) -> None:
        """Wait until everything that was sent has been received."""
        self._sender.flush()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return added(a, b.to(a.device))

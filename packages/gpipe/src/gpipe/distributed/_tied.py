"""Parameters that stages on several ranks share: each rank has a copy of its own, and the copies stay equal.

At first the rank with the first stage that has a parameter sends its value to the others. At the end of a step that
rank adds the gradients in the order of the ranks' first stages, and sends the sum back, so equal optimizers change all
copies in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..engine._accumulate import added
from ..engine._parameters import contents_of
from ..engine._tied import shared_tensors
from ._messages import RemoteLink
from ._wires import Wires


class Twin(NamedTuple):
    """A tensor of this rank that other ranks have too.

    Attributes:
        members: the ranks that have it, in the order of their first stages with it; the first one owns it.
        module, name: the module that holds it here, and its name there.
    """

    members: list[int]
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

    Also for each pair of ranks that send such tensors to each other, of all ranks, a stage of each that has one.
    """
    parts = [contents_of(partition) for partition in partitions]
    shared = shared_tensors([part.tensors for part in parts])
    holders: dict[int, dict[int, tuple[int, nn.Module, str]]] = {}  # by tensor and rank: its first stage, and where
    for stage, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
        for module in part.modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if id(tensor) in shared:
                    holders.setdefault(id(tensor), {}).setdefault(rank, (stage, module, name))
    crossing = [each for each in holders.values() if len(each) > 1]
    twins = [Twin([*each], *each[me][1:]) for each in crossing if me in each]
    ties: dict[frozenset[int], tuple[int, int]] = {}
    for each in crossing:
        owner, *others = each
        for k in others:
            ties.setdefault(frozenset((owner, k)), (each[owner][0], each[k][0]))
    return twins, [*ties.values()]


class Twins:
    """Keeps the copies of shared tensors equal, by messages over ``links``, and ``wires`` between accelerators."""

    def __init__(self, found: Sequence[Twin], me: int, links: Mapping[int, RemoteLink], wires: Wires) -> None:
        self._owned = [twin for twin in found if twin.members[0] == me]
        self._others = [twin for twin in found if twin.members[0] != me]
        self._links = links
        self._wires = wires

    def of_others(self) -> set[Tensor]:
        """The tensors of this rank that another one owns."""
        return {twin.tensor for twin in self._others}

    def spread_values(self) -> None:
        """Give all tensors the values that their owners have."""
        values = {twin.tensor: twin.tensor.detach() for twin in self._owned}
        self.add_up(values)  # the others add nothing
        with torch.no_grad():
            for twin in self._others:
                twin.tensor.copy_(values[twin.tensor])

    def trained(self, module: nn.Module) -> list[Tensor]:
        twins = [twin.tensor for twin in (*self._owned, *self._others)]
        below = {*contents_of(module).parameters} if twins else set()
        return [tensor for tensor in twins if tensor.requires_grad and tensor in below]

    def add_up(self, sums: dict[Tensor, Tensor]) -> None:
        """Replace what ``sums`` has for shared tensors, such as gradients, by its sums over all ranks.

        All ranks handle the tensors in the same order, and send their parts before they receive sums: so messages
        between two ranks are read in the order in which they were sent.
        """
        for twin in self._others:
            self._put(twin.members[0], [_dense(sums.pop(twin.tensor, None))])
        for twin in self._owned:
            parts = [_dense(sums.pop(twin.tensor, None)), *[self._get(k)[0] for k in twin.members[1:]]]
            there = [part.to(twin.tensor.device) for part in parts if part is not None]
            whole = reduce(added, there) if there else None
            for k in twin.members[1:]:
                self._put(k, [whole])
            sums |= {} if whole is None else {twin.tensor: whole}
        for twin in self._others:
            (whole,) = self._get(twin.members[0])
            sums |= {} if whole is None else {twin.tensor: whole.to(twin.tensor.device)}
        self._flush()

    def _flush(self) -> None:
        """Wait until everything that was sent has been received, also by devices: nothing else checks that."""
        for link in self._links.values():
            link.flush()
        if self._links:
            self._wires.settle()
            self._wires.check()

    def _put(self, member: int, tensors: list[Tensor | None]) -> None:
        self._links[member].put(0, tensors)

    def _get(self, member: int) -> list[Tensor | None]:
        self._links[member].expect(1)
        found: list[Tensor | None] = self._links[member].get()[2]
        return found


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

"""Parameters that stages on several ranks share: each rank has a copy of its own, and the copies stay equal.

When the pipe is made, the rank with the first stage that has a parameter sends its value to the others. At the end of a
step the gradients are sent to that rank, which adds them in the order of the stages, as one process does, and sends the
sum back. So equal optimizers change all copies in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..engine._accumulate import added
from ..engine._parameters import modules_below, parameters_of
from ..engine._tied import shared_tensors
from ._messages import RemoteLink
from ._wires import Wires


class Twin(NamedTuple):
    """A tensor of this rank that other ranks have too.

    Attributes:
        stages: the stages of each rank that has it; the ranks are in the order of their first stages.
        module, name: the module that holds it here, and its name there.
    """

    stages: dict[int, list[int]]
    module: nn.Module
    name: str

    @property
    def members(self) -> list[int]:
        """The ranks that have it; the first one owns it."""
        return [*self.stages]

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
    holders: dict[int, dict[int, dict[int, tuple[nn.Module, str]]]] = {}  # by tensor, rank and stage
    for stage, (rank, modules) in enumerate(zip(ranks, parts, strict=True)):
        for module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if id(tensor) in shared:
                    holders.setdefault(id(tensor), {}).setdefault(rank, {}).setdefault(stage, (module, name))
    crossing = [each for each in holders.values() if len(each) > 1]
    stages = [{rank: [*own] for rank, own in each.items()} for each in crossing]
    twins = [Twin(of, *each[me][of[me][0]]) for of, each in zip(stages, crossing, strict=True) if me in each]
    ties: dict[frozenset[int], tuple[int, int]] = {}
    for of in stages:
        owner, *others = of
        for k in others:
            ties.setdefault(frozenset((owner, k)), (of[owner][0], of[k][0]))
    return twins, [*ties.values()]


class Twins:
    """Keeps the copies of shared tensors equal.

    Args:
        found: the tensors of this rank.
        me: the number of this rank.
        links: the messages to and from each rank that shares any of them.
        wires: the connections between accelerators that these may use.
    """

    def __init__(self, found: Sequence[Twin], me: int, links: Mapping[int, RemoteLink], wires: Wires) -> None:
        self._me = me
        self._owned = [twin for twin in found if twin.members[0] == me]
        self._others = [twin for twin in found if twin.members[0] != me]
        self._links = links
        self._wires = wires

    @property
    def are_there(self) -> bool:
        """Whether this rank shares any tensors."""
        return bool(self._links)

    def of_others(self) -> set[Tensor]:
        """The tensors of this rank that another one has before."""
        return {twin.tensor for twin in self._others}

    def spread_values(self) -> None:
        """Send the values of the first rank that has each tensor to the others."""
        for twin in self._owned:
            for k in twin.members[1:]:
                self._put(k, [twin.tensor.detach()])
        with torch.no_grad():
            for twin in self._others:
                (value,) = self._get(twin.members[0])
                assert value is not None
                twin.tensor.copy_(value)
        self._flush()

    def trained(self, module: nn.Module) -> list[Tensor]:
        """The leaves in ``module`` whose gradients have to be summed over ranks."""
        twins = [twin.tensor for twin in (*self._owned, *self._others)]
        below = {*parameters_of(module)} if twins else set()
        return [tensor for tensor in twins if tensor.requires_grad and tensor in below]

    def summed(self, parts: Sequence[tuple[int, Tensor, Tensor]], numbers: Sequence[int]) -> dict[Tensor, Tensor]:
        """The gradients of all leaves in a run; those of shared leaves are sums over all ranks.

        All ranks handle the tensors in the same order, and send their parts before they receive sums: so messages
        between two ranks are read in the order in which they were sent.

        Args:
            parts: see :meth:`gpipe.engine._run.Run.parts`.
            numbers: the stages of this rank.
        """
        grown: dict[Tensor, dict[int, Tensor]] = {}
        for k, leaf, gradient in parts:
            own = grown.setdefault(leaf, {})
            own[numbers[k]] = added(own[numbers[k]], gradient) if numbers[k] in own else gradient
        for twin in self._others:
            self._put(twin.members[0], self._of_stages(twin, grown))
        sums: list[tuple[Tensor, Tensor | None]] = []
        for twin in self._owned:
            found = [self._of_stages(twin, grown), *map(self._get, twin.members[1:])]
            stages = [stage for own in twin.stages.values() for stage in own]
            in_order = sorted(zip(stages, chain.from_iterable(found), strict=True), key=itemgetter(0))
            sums.append((twin.tensor, reduce(_sum, [gradient for _, gradient in in_order])))
            for k in twin.members[1:]:
                self._put(k, [sums[-1][1]])
        sums += [(twin.tensor, self._get(twin.members[0])[0]) for twin in self._others]
        self._flush()
        alone = {leaf: reduce(added, own.values()) for leaf, own in grown.items()}
        return alone | {tensor: whole.to(tensor.device) for tensor, whole in sums if whole is not None}

    def _of_stages(self, twin: Twin, grown: dict[Tensor, dict[int, Tensor]]) -> list[Tensor | None]:
        """The gradient of each stage of this rank that has the tensor, which leave ``grown``."""
        found, stages = grown.pop(twin.tensor, {}), twin.stages[self._me]
        own = {k: gradient.to_dense() if gradient.is_sparse else gradient for k, gradient in found.items()}
        return [*own.values()] or [None] if len(stages) == 1 else [own.get(stage) for stage in stages]

    def _flush(self) -> None:
        """Wait until everything that was sent has been received, also by devices: nothing else checks that."""
        for link in self._links.values():
            link.flush()
        if self._links:
            self._wires.settle()

    def _put(self, member: int, tensors: list[Tensor | None]) -> None:
        self._links[member].put(0, tensors)

    def _get(self, member: int) -> list[Tensor | None]:
        """The next tensors; if they go from device to device, their transfer is queued."""
        self._links[member].expect(1)
        found: list[Tensor | None] = self._links[member].get()[2]
        return found


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return added(a, b.to(a.device))

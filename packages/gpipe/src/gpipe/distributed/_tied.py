"""Parameters shared by stages on several ranks: each rank keeps a copy, and the copies stay equal.

The owner of a parameter is the rank of the first stage that has it. It sends the initial value to the other ranks. At
the end of each step, it adds the gradients in the order of the ranks' first stages, and sends back the sum, so that
equal optimizers change all copies equally. At the end of each run, all ranks compare the copies, because a parameter
may have a different name on each rank, and an optimizer that selects by name may treat the copies differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine._accumulate import add
from ..engine._scale import HALVES, wide
from ..engine._tied import collect_contents, find_shared_tensors
from ._device_links import DeviceLinks
from ._messages import RemoteLink


class TiedState(NamedTuple):
    """The state of a rank's copy of a shared tensor.

    Attributes:
        name: a name for error messages.
        requires_grad: the ``requires_grad`` of the copy.
        figures: the sum and the norm of its values; None if the module no longer has the tensor.
        rounding: the allowed difference between copies, relative to the norm.
    """

    name: str
    requires_grad: bool
    figures: tuple[float, float] | None
    rounding: float = 0.0

    def is_like(self, other: TiedState) -> bool:
        """Return whether the copies are equal up to rounding: averages over replicas may be summed in different orders.

        If this changes the last bit of every gradient, float32 copies differ by 5e-7 after 20,000 steps of AdamW.
        """
        if self.figures is None or other.figures is None or self.requires_grad != other.requires_grad:
            return False
        # A NaN is not larger than anything, so copies that contain one count as equal.
        within = max(self.rounding, other.rounding) * self.figures[1]
        return not any(abs(a - b) > within for a, b in zip(self.figures, other.figures, strict=True))


_ROUNDING, _ROUNDING_OF_HALVES = 1e-4, 1e-3


class TiedTensor(NamedTuple):
    """A tensor of this rank that other ranks also have.

    Attributes:
        number: its index among all shared tensors, equal on all ranks.
        members: the ranks that have it, ordered by their first stages with it. The first one owns it.
        module, name: the module that holds it on this rank, and its name in the module.
    """

    number: int
    members: list[int]
    module: nn.Module
    name: str

    def state(self) -> TiedState:
        name, module = f"{type(self.module).__name__}.{self.name}", self.module
        if self.name not in module._parameters and self.name not in module._buffers:
            return TiedState(name, False, None)
        data: Any = self.tensor.detach()
        data = data.to_local() if hasattr(data, "to_local") else data
        data = torch.view_as_real(data) if data.is_complex() else data.to_dense()
        rounding = _ROUNDING_OF_HALVES if data.dtype in HALVES else _ROUNDING
        total, norm = _figures(data, wide(data.device)).tolist()
        return TiedState(name, self.tensor.requires_grad, (total, norm), rounding)

    @property
    def tensor(self) -> Tensor:
        """The tensor, looked up on each access, because the module may have been moved."""
        found: Tensor = getattr(self.module, self.name)
        return found


def find_tied(
    partitions: Sequence[nn.Module], ranks: Sequence[int], me: int
) -> tuple[list[TiedTensor], list[tuple[int, int]]]:
    """Return the parameters and buffers of rank ``me`` that stages on other ranks also have.

    Also return, for each pair of ranks in the pipe that exchange such tensors, two stages that have one, one per rank.
    """
    parts = [collect_contents(partition) for partition in partitions]
    shared = find_shared_tensors([part.tensors for part in parts])
    holders: dict[int, dict[int, tuple[int, nn.Module, str]]] = {}  # by tensor and rank: its first stage, and where
    for stage, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
        for module in part.modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if id(tensor) in shared:
                    holders.setdefault(id(tensor), {}).setdefault(rank, (stage, module, name))
    crossing = [each for each in holders.values() if len(each) > 1]
    tied = [TiedTensor(number, [*each], *each[me][1:]) for number, each in enumerate(crossing) if me in each]
    ties: dict[frozenset[int], tuple[int, int]] = {}
    for each in crossing:
        owner, *others = each
        for k in others:
            ties.setdefault(frozenset((owner, k)), (each[owner][0], each[k][0]))
    return tied, [*ties.values()]


class TiedTensors:
    """Keeps copies of shared tensors equal, with messages over ``links``, or ``device_links`` for accelerators."""

    def __init__(
        self, found: Sequence[TiedTensor], me: int, links: Mapping[int, RemoteLink], device_links: DeviceLinks
    ) -> None:
        self._owned = [each for each in found if each.members[0] == me]
        self._others = [each for each in found if each.members[0] != me]
        self._links = links
        self._device_links = device_links

    def of_others(self) -> set[Tensor]:
        """Return the tensors of this rank that another rank owns."""
        return {each.tensor for each in self._others}

    def spread_values(self) -> None:
        """Copy the value of each tensor from its owner to the other ranks."""
        values = {each.tensor: each.tensor.detach() for each in self._owned}
        self.add_up(values)  # the other ranks have no entries to add
        with torch.no_grad():
            for each in self._others:
                each.tensor.copy_(values[each.tensor])

    def states(self) -> dict[int, TiedState]:
        return {each.number: each.state() for each in (*self._owned, *self._others)}

    def find_trained(self, module: nn.Module) -> list[Tensor]:
        tied = [each.tensor for each in (*self._owned, *self._others)]
        below = {*collect_contents(module).parameters} if tied else set()
        return [tensor for tensor in tied if tensor.requires_grad and tensor in below]

    def add_up(self, sums: dict[Tensor, Tensor]) -> None:
        """Replace the entries of ``sums`` for shared tensors, such as gradients, by their sums over all ranks.

        All ranks handle the tensors in the same order, and send their parts before they receive sums, so messages
        between two ranks are received in the order they were sent.
        """
        for each in self._others:
            self._put(each.members[0], [_dense(sums.pop(each.tensor, None))])
        for each in self._owned:
            parts = [_dense(sums.pop(each.tensor, None)), *[self._get(k)[0] for k in each.members[1:]]]
            there = [part.to(each.tensor.device) for part in parts if part is not None]
            whole = reduce(add, there) if there else None
            for k in each.members[1:]:
                self._put(k, [whole])
            sums |= {} if whole is None else {each.tensor: whole}
        for each in self._others:
            (whole,) = self._get(each.members[0])
            sums |= {} if whole is None else {each.tensor: whole.to(each.tensor.device)}
        self._flush()

    def _flush(self) -> None:
        """Wait until all messages have been received, even by devices: nothing else checks this."""
        for link in self._links.values():
            link.flush()
        if self._links:
            self._device_links.settle()
            self._device_links.check()

    def _put(self, member: int, tensors: list[Tensor | None]) -> None:
        self._links[member].put(0, tensors)

    def _get(self, member: int) -> list[Tensor | None]:
        self._links[member].expect(1)
        found: list[Tensor | None] = self._links[member].get()[2]
        return found


def expect_equal_copies(states: Sequence[Mapping[int, TiedState]], members: Sequence[int]) -> None:
    """Raise ValueError unless all copies of each tensor are equal.

    Args:
        states: the states of each member's copies, by tensor index.
        members: the global rank of each member.
    """
    first: dict[int, tuple[int, TiedState]] = {}
    for rank, copies in zip(members, states, strict=True):
        for number, state in copies.items():
            owner, own = first.setdefault(number, (rank, state))
            if rank != owner and not own.is_like(state):
                raise ValueError(
                    f"{own.name} of rank {owner} and {state.name} of rank {rank} are one tensor of the model, but now "
                    "differ in their values or requires_grad, or one was replaced; treat them equally on all ranks "
                    "when you freeze, load or prune them, and in optimizers, which may select by names that differ "
                    "between ranks, and do not modify them in a forward"
                )


def _figures(data: Tensor, widest: torch.dtype) -> Tensor:
    """Return the sum and the norm of all values.

    Only the results of rows are widened. A wide copy of all values takes 16 times as long on a CPU (for 50,257 by 128
    values). Unlike one narrow sum, this is exact to a few roundings of the norm, even if all values are positive.
    """
    kind = widest if not data.is_floating_point() else torch.float32 if data.dtype in HALVES else data.dtype
    data = data.to(kind)
    sums, norms = data.sum(-1), torch.linalg.vector_norm(data, dim=-1)
    return torch.stack([sums.sum(dtype=widest), torch.linalg.vector_norm(norms, dtype=widest)])


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

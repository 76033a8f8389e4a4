"""Try how a model's own loss is put together: compute it for a few rows at once, and from parts of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..engine._loss_value import loss_value, own_loss
from ..engine._reductions import Reductions
from ._ending import BLOCK, LOSS_ONLY, Ending, Returned
from ._inputs import Inputs
from ._own_loss import KINDS, CombineError, Kinds, LossKind, OwnLoss
from ._segment import Segment

ROWS = 3
PARTS = ([0], [1, 2])
ITEMS = 7
"""A number of items that differs from all counts."""


class Values(NamedTuple):
    """What a loss is computed from: the inputs, and what modules returned."""

    inputs: Inputs
    returned: Returned

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Values:
        args, kwargs, returned = _pytree.tree_map_only(Tensor, change, (*self.inputs, self.returned))
        return Values(Inputs(args, kwargs), returned)

    def with_items(self) -> Values:
        kwargs = {**self.inputs.kwargs, **dict.fromkeys(LOSS_ONLY, torch.tensor(ITEMS))}
        return self._replace(inputs=self.inputs._replace(kwargs=kwargs))

    def part(self, rows: list[int]) -> Values:
        def taken(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] % ROWS:
                return tensor
            return tensor.reshape(ROWS, -1, *tensor.shape[1:])[rows].flatten(0, 1)

        return self.mapped(taken)

    def variants(self, constants: set[int]) -> Iterator[Values]:
        """These values, and others in which a part of the first row does not count: labels, masks, ``constants``."""
        yield self
        yield self._replace(returned={key: tensor / 16 for key, tensor in self.returned.items()})
        leaves, tree = self.inputs.leaves()
        for k, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.dim():
                continue
            for filling in sorted(constants):
                tensor = leaf.clone()
                tensor[(0,) if tensor.dim() == 1 else (0, ..., slice(tensor.shape[-1] // 2, None))] = filling
                yield self._replace(inputs=Inputs(*tree.value([*leaves[:k], tensor, *leaves[k + 1 :]])))


class Trial(NamedTuple):
    """Computes the loss of a model for rows that are made from its sample; ``output`` is that of the last layer."""

    output: Callable[[Values], Any]

    def kinds(self, values: Values) -> Kinds:
        plain, counted = self._loss(values), self._loss(values.with_items())
        without = self._kind(values)
        # Many models ignore the number, or do not take it.
        same = counted is None or (plain is not None and torch.equal(plain, counted))
        return {False: without, True: without if same else self._kind(values.with_items())}

    def differs(self, *values: Values) -> bool:
        """Whether the loss for the first is another one than for the second; of equal values, whether it is random."""
        one, other = map(self._loss, values)
        return one is None or other is None or not torch.equal(one, other)

    def _kind(self, values: Values) -> LossKind | None:
        with Reductions() as seen:
            whole = self._loss(values)
        # What a mean that is computed by hand divides by may be a count, which the sample need not show: a mask of a
        # module, or weights of classes that it does not have. Only the number of items is one for all rows.
        if whole is None or seen.is_cut or any(float(each) != ITEMS for each in seen.divisors):
            return None
        # A loss may leave out what is equal to a constant, or beyond it: those with which it compares something.
        constants = {0, 1, -100, *(each + off for each in seen.constants() for off in (-1, 0, 1))}
        tried: list[tuple[Values, Tensor]] = []
        for each in values.variants(constants):
            loss = self._loss(each)
            if loss is not None and not any(loss.equal(known) for _, known in tried):  # it makes a difference
                tried.append((each, loss))
        for name in KINDS if tried else ():
            own = OwnLoss("the model", dict.fromkeys((False, True), LossKind(name)))
            if all(self._agrees(each, loss, own) for each, loss in tried):
                return LossKind(name, seen.any())
        return None

    def _loss(self, values: Values) -> Tensor | None:
        """The loss of all rows; None if there is none."""
        try:
            loss = own_loss(self.output(values))
        except Exception:  # a model may raise anything for labels that it does not know
            return None
        return loss if bool(loss.isfinite()) else None

    def _agrees(self, values: Values, expected: Tensor, own: OwnLoss) -> bool:
        """Whether the losses of parts give that of all rows, unless a step refuses to combine them."""
        combine, found = own.whole(), []
        try:
            for rows in PARTS:
                part = values.part(rows)
                loss = own.part(lambda part=part: self.output(part), counted=False)  # type: ignore[misc]
                found.append(loss_value(combine(loss, len(rows) / ROWS)))
        except CombineError:
            return True
        except Exception:  # as above
            return False
        total = torch.stack([each.total.double() for each in found]).sum()
        if found[0].count is not None:
            total = total / sum(float(each.count) for each in found)
        return torch.allclose(total, expected.double(), rtol=1e-5, atol=1e-7)


def kinds_of(ending: Ending, segment: Segment, inputs: Inputs, returned: Returned) -> Kinds:
    """How losses of a model are combined, tried on random numbers in place of what modules returned, on the CPU.

    Both modes of a model must agree, unless it draws random numbers in training.
    """
    rows, generator = inputs.rows(), torch.Generator().manual_seed(0)
    values = Values(
        Values(inputs, {}).mapped(lambda tensor: _more(_moved(tensor), rows, generator)).inputs,
        {key: _random(tensor, rows, generator) for key, tensor in returned.items()},
    )

    local = cache(_moved)

    def trial(training: bool) -> Trial:
        net = _local(ending.net(segment), training)
        return Trial(lambda values: segment.pick(ending(segment, *values, net=net, local=local)))

    with torch.no_grad():
        # A balancing loss of experts is a product of means, and may be so small that those of parts seem to add up.
        routers = {key for key, tensor in values.returned.items() if key[0] != BLOCK and len(tensor) != ROWS}
        known = {key: tensor * (math.nan if key in routers else 1) for key, tensor in values.returned.items()}
        if routers and trial(training=False).differs(values, values._replace(returned=known)):
            return dict.fromkeys((False, True))
        found, training = trial(training=False).kinds(values), trial(training=True)
        if training.differs(values, values):
            return found
        return {counted: kind if found[counted] == kind else None for counted, kind in training.kinds(values).items()}


def _local(net: nn.Module, training: bool) -> nn.Module:
    """A copy of ``net`` with all its tensors as :func:`_moved` makes them."""
    held = [t for module in net.modules() for own in (module._parameters, module._buffers) for t in own.values()]
    return copy.deepcopy(net, {id(tensor): _moved(tensor) for tensor in held if tensor is not None}).train(training)


def _moved(tensor: Tensor) -> Tensor:
    """A copy on the CPU, in the precision of random numbers; ones in the place of what has no data.

    Of a parameter one more: a term that it adds to the loss, and that is 0 as yet, would not show.
    """
    local = torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()
    if not local.is_floating_point():
        return local.clone()
    local = local.to(torch.get_default_dtype())
    return nn.Parameter(local + 1, requires_grad=False) if isinstance(tensor, nn.Parameter) else local


def _more(tensor: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """A tensor of :data:`ROWS` rows, made of the ``rows`` of this one; itself if it has others."""
    if not tensor.dim() or not rows or tensor.shape[0] % rows or not tensor.shape[0]:
        return tensor
    each = tensor.reshape(rows, -1, *tensor.shape[1:])
    found = torch.stack([each[j % rows].roll(j, -1) if tensor.dim() > 1 else each[j % rows] for j in range(ROWS)])
    if tensor.is_floating_point():
        noise = 0.1 * torch.randn(found.shape, generator=generator).to(found)
        found = (found + noise).clamp(tensor.min(), tensor.max())  # some are probabilities
    return found.flatten(0, 1)


def _random(tensor: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Random numbers in the shape of ``tensor`` with :data:`ROWS` rows, larger in each, so that losses differ."""
    if not tensor.is_floating_point():
        return _more(torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu(), rows, generator)
    shape = (ROWS * (tensor.shape[0] // rows), *tensor.shape[1:])
    if not tensor.is_meta and bool(tensor.clamp(0, 1).equal(tensor)):  # probabilities
        return torch.rand(shape, generator=generator)
    scale = torch.arange(1, shape[0] + 1).reshape(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=generator) * scale

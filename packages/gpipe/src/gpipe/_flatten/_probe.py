"""Try how a model's own loss is put together: compute it for a few rows at once, and from parts of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..engine._loss_value import loss_value, own_loss
from ._ending import LOSS_ONLY, Ending, Returned
from ._inputs import Inputs
from ._own_loss import KINDS, CombineError, OwnLoss
from ._reductions import Reductions
from ._segment import Segment

ROWS = 3
PARTS = ([0], [1, 2])
ITEMS = 7
"""A number of items that differs from all counts."""

Kinds = dict[bool, str | None]
"""How a loss is combined, without and with a number of items."""
Observed = dict[bool, bool]
"""Whether a mean or a sum was seen, in the same cases."""


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

    def filled(self, k: int, filling: int) -> Values:
        """These values with another one in a part of the first row of input number ``k``."""
        leaves, tree = self.inputs.leaves()
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][k]
        leaves[at] = tensor = leaves[at].clone()
        tensor[(0,) if tensor.dim() == 1 else (0, ..., slice(tensor.shape[-1] // 2, None))] = filling
        return self._replace(inputs=Inputs(*tree.value(leaves)))


class Trial(NamedTuple):
    """Computes the loss of a model for rows that are made from its sample.

    Args:
        model: the name of its class.
        output: what the last layer returns for these values.
        values: of :data:`ROWS` rows.
    """

    model: str
    output: Callable[[Values], Any]
    values: Values

    def kinds(self) -> Kinds:
        """The kinds of the loss."""
        plain, counted = self._loss(self.values), self._loss(self.values.with_items())
        without = self._kind(self.values)
        # Many models ignore the number, or do not take it.
        same = counted is None or (plain is not None and torch.equal(plain, counted))
        return {False: without, True: without if same else self._kind(self.values.with_items())}

    def is_random(self) -> bool:
        one, other = self._loss(self.values), self._loss(self.values)
        return one is None or other is None or not torch.equal(one, other)

    def _kind(self, values: Values) -> str | None:
        losses = [(each, self._loss(each)) for each in self._variants(values)]
        known = [(each, loss) for each, loss in losses if loss is not None]
        # What makes no difference needs no trial.
        tried = [known[k] for k in range(len(known)) if all(not known[k][1].equal(loss) for _, loss in known[:k])]
        for kind in KINDS if tried else ():
            own = OwnLoss(self.model, dict.fromkeys((False, True), kind))
            if all(self._agrees(each, loss, own) for each, loss in tried):
                return kind
        return None

    def _variants(self, values: Values) -> Iterator[Values]:
        """``values``, and others in which a part of the first row does not count, if it is a label or a mask.

        A loss may leave out what is equal to a constant, such as the number of a padding token, or beyond it. Tried are
        the constants that it compares with.
        """
        constants = sorted({0, -100, *(each + off for each in self.seen(values).constants() for off in (-1, 0, 1))})
        yield values
        yield values._replace(returned={key: tensor / 16 for key, tensor in values.returned.items()})
        for k, tensor in enumerate(values.inputs.tensors()):
            is_number = tensor.dtype != torch.bool and not tensor.is_floating_point()
            for filling in (constants if is_number else [0]) if tensor.dim() else ():
                yield values.filled(k, filling)

    def seen(self, values: Values) -> Reductions:
        found = Reductions()
        with found:
            self._loss(values)
        return found

    def _loss(self, values: Values) -> Tensor | None:
        """The loss of all rows; None if there is none for these values."""
        try:
            loss = own_loss(self.output(values))
        except Exception:  # a model may raise anything for labels that it does not know
            return None
        return loss if bool(loss.isfinite()) else None

    def _agrees(self, values: Values, expected: Tensor, own: OwnLoss) -> bool:
        """Whether the losses of parts give that of all rows, unless a step refuses to combine them."""
        combine = own.whole()
        counted = not LOSS_ONLY.isdisjoint(values.inputs.kwargs)
        parts = [values.mapped(partial(_taken, rows=rows)) for rows in PARTS]
        try:
            outputs = [own.part(partial(self.output, part), counted=counted) for part in parts]
            found = [loss_value(combine(each, len(rows) / ROWS)) for each, rows in zip(outputs, PARTS, strict=True)]
        except CombineError:
            return True
        except Exception:  # as above
            return False
        total = torch.stack([each.total.double() for each in found]).sum()
        if found[0].count is not None:
            total = total / sum(each.count.double() for each in found)
        return torch.allclose(total, expected.double(), rtol=1e-5, atol=1e-7)


def kinds_of(
    model: nn.Module, ending: Ending, segment: Segment, pick: Callable[[Any], Any], inputs: Inputs, returned: Returned
) -> tuple[Kinds, Observed]:
    """How losses of ``model`` are combined, tried on random numbers in place of what modules returned, on the CPU.

    Both modes of a model must agree, unless it draws random numbers in training.

    Args:
        segment: the last one.
        returned: what modules returned for ``inputs``.
    """
    rows = next((tensor.shape[0] for tensor in inputs.tensors() if tensor.dim()), 0)
    generator = torch.Generator().manual_seed(0)
    values = Values(
        Values(inputs, {}).mapped(lambda t: _more(t.cpu(), rows, generator)).inputs,
        {key: _random(tensor, rows, generator) for key, tensor in returned.items()},
    )
    name = type(model).__name__
    with torch.no_grad():
        evaluating, training = (
            Trial(name, partial(_output, ending, segment, pick, _local(ending.net(segment), mode)), values)
            for mode in (False, True)
        )
        found = evaluating.kinds()
        if not training.is_random():
            found = {counted: kind if found[counted] == kind else None for counted, kind in training.kinds().items()}
        cases = {False: values, True: values.with_items()}
        return found, {counted: evaluating.seen(each).any() for counted, each in cases.items()}


def _output(ending: Ending, segment: Segment, pick: Callable[[Any], Any], net: nn.Module, values: Values) -> Any:
    return pick(ending(segment, *values, net=net))


def _local(net: nn.Module, training: bool) -> nn.Module:
    """A copy on the CPU, in the precision of random numbers; ones in the place of what has no data."""

    def moved(tensor: Tensor) -> Tensor:
        local = torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()
        local = local.float() if local.is_floating_point() else local.clone()
        return nn.Parameter(local, requires_grad=False) if isinstance(tensor, nn.Parameter) else local

    held = [t for module in net.modules() for own in (module._parameters, module._buffers) for t in own.values()]
    return copy.deepcopy(net, {id(tensor): moved(tensor) for tensor in held if tensor is not None}).train(training)


def _more(tensor: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """A tensor of :data:`ROWS` rows, made of the ``rows`` of this one; itself if it has others."""
    if not tensor.dim() or not rows or tensor.shape[0] % rows or not tensor.shape[0]:
        return tensor
    each = tensor.reshape(rows, -1, *tensor.shape[1:])
    found = torch.stack([each[j % rows].roll(j, -1) if tensor.dim() > 1 else each[j % rows] for j in range(ROWS)])
    if tensor.is_floating_point():
        found = found + 0.1 * torch.randn(found.shape, generator=generator).to(found)
    return found.flatten(0, 1)


def _random(tensor: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Random numbers in the shape of ``tensor`` with :data:`ROWS` rows, larger in each, so that losses differ."""
    if not tensor.is_floating_point():
        return _more(torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu(), rows, generator)
    shape = (ROWS * (tensor.shape[0] // rows), *tensor.shape[1:])
    scale = torch.arange(1, shape[0] + 1).reshape(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=generator) * scale


def _taken(tensor: Tensor, rows: list[int]) -> Tensor:
    if not tensor.dim() or tensor.shape[0] % ROWS:
        return tensor
    return tensor.reshape(ROWS, -1, *tensor.shape[1:])[rows].flatten(0, 1)

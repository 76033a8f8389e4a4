"""Try how a model's own loss is put together: compute it for a few rows at once, and from parts of them."""

from __future__ import annotations

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
from ._segment import Segment
from ._verify import in_a_row

ROWS = 3
PARTS = ([0], [1, 2])
ITEMS = 7
"""A number of items that differs from all counts."""


class Values(NamedTuple):
    """What a loss is computed from: the inputs, and for an ending what modules returned."""

    inputs: Inputs
    returned: Returned

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Values:
        args, kwargs, returned = _pytree.tree_map_only(Tensor, change, (*self.inputs, self.returned))
        return Values(Inputs(args, kwargs), returned)

    def with_items(self) -> Values:
        kwargs = {**self.inputs.kwargs, **dict.fromkeys(LOSS_ONLY, torch.tensor(ITEMS))}
        return self._replace(inputs=self.inputs._replace(kwargs=kwargs))


class Trial(NamedTuple):
    """Computes the loss of a model for rows that are made from its sample.

    Args:
        whole: the output for these values.
        part: what the last layer returns for them where the given object combines losses.
        values: of :data:`ROWS` rows.
        harmless: whether labels may be out of range: on some devices they end the process.
    """

    whole: Callable[[Values], Any]
    part: Callable[[Values, OwnLoss], Any]
    values: Values
    harmless: bool

    def kinds(self, model: str) -> dict[bool, str | None]:
        """The kinds of a loss: how it is combined without and with a number of items."""
        plain, counted = self._loss(self.values), self._loss(self.values.with_items())
        without = self._kind(model, self.values)
        # Many models ignore the number, or do not take it.
        same = counted is None or (plain is not None and torch.equal(plain, counted))
        return {False: without, True: without if same else self._kind(model, self.values.with_items())}

    def _kind(self, model: str, values: Values) -> str | None:
        losses = [(each, self._loss(each)) for each in self._variants(values)]
        known = [(each, loss) for each, loss in losses if loss is not None]
        # What makes no difference needs no trial.
        tried = [known[k] for k in range(len(known)) if all(not known[k][1].equal(loss) for _, loss in known[:k])]
        for kind in KINDS if tried else ():
            own = OwnLoss(model, dict.fromkeys((False, True), kind), has_ending=True)
            if all(self._agrees(each, loss, own) for each, loss in tried):
                return kind
        return None

    def _variants(self, values: Values) -> Iterator[Values]:
        """``values``, and others in which a part of the first row does not count, if it is a label or a mask."""
        yield values
        for k, tensor in enumerate(values.inputs.tensors()):
            fillings = (
                [0] if tensor.dtype == torch.bool or tensor.is_floating_point() or not self.harmless else [0, -100]
            )
            for filling in fillings if tensor.dim() else ():
                yield self._filled(values, k, filling)

    @staticmethod
    def _filled(values: Values, k: int, filling: int) -> Values:
        leaves, tree = values.inputs.leaves()
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][k]
        leaves[at] = tensor = leaves[at].clone()
        tensor[(0,) if tensor.dim() == 1 else (0, ..., slice(tensor.shape[-1] // 2, None))] = filling
        return values._replace(inputs=Inputs(*tree.value(leaves)))

    def _loss(self, values: Values) -> Tensor | None:
        """The loss of all rows; None if there is none for these values."""
        try:
            loss = own_loss(self.whole(values))
        except Exception:  # a model may raise anything for labels that it does not know
            return None
        return loss if bool(loss.isfinite()) else None

    def _agrees(self, values: Values, expected: Tensor, own: OwnLoss) -> bool:
        """Whether the losses of parts give that of all rows, unless a step refuses to combine them."""
        combine = own.whole()
        try:
            parts = [self.part(values.mapped(partial(_taken, rows=rows)), own) for rows in PARTS]
            found = [loss_value(combine(part, len(rows) / ROWS)) for part, rows in zip(parts, PARTS, strict=True)]
        except CombineError:
            return True
        except Exception:  # as above
            return False
        if not self.harmless and not all(part["adds"] or part["counts"] is not None for part in parts):
            return False  # what has not been tried is not relied on
        total = torch.stack([each.total.double() for each in found]).sum()
        if found[0].count is not None:
            total = total / sum(each.count.double() for each in found)
        return torch.allclose(total, expected.double(), rtol=1e-5, atol=1e-7)


def computes_loss(layers: nn.Sequential, inputs: Inputs) -> bool:
    """Whether the last of the layers returns a loss for ``inputs``, or an output with one."""
    try:
        with torch.no_grad():
            own_loss(in_a_row(layers, inputs))
    except TypeError:
        return False
    return True


def add_own_loss(model: nn.Module, layers: nn.Sequential, inputs: Inputs, returned: Returned | None) -> None:
    """Give the last layer what combines the losses of micro-batches that the model computes.

    Args:
        returned: what modules returned for ``inputs``, if the layers have an ending.
    """
    last = layers[-1]
    assert isinstance(last, Segment)
    rows = next((tensor.shape[0] for tensor in inputs.tensors() if tensor.dim()), 0)
    name = type(model).__name__
    with torch.no_grad():
        if last.ending is None or returned is None:
            trial = _of_layers(layers, inputs, rows)
        else:
            trial = _of_ending(last.ending, inputs, returned, rows)
        kinds = trial.kinds(name) if trial is not None else dict.fromkeys((False, True))
    last.__dict__["own_loss"] = OwnLoss(name, kinds, has_ending=last.ending is not None)


def _of_ending(ending: Ending, inputs: Inputs, returned: Returned, rows: int) -> Trial:
    """On random numbers in place of what modules returned; on the CPU, also for a model without data."""
    generator = torch.Generator().manual_seed(0)
    local = ending.on_cpu()
    values = Values(
        Values(inputs, {}).mapped(lambda t: _more(t.cpu(), rows, generator)).inputs,
        Values(Inputs((), {}), returned).mapped(lambda t: _random(t, rows, generator)).returned,
    )
    for name in ending.state:  # the same for all rows
        values.returned[name] = [[tensor[:1].expand_as(tensor) for tensor in call] for call in values.returned[name]]

    def whole(values: Values) -> Any:
        return local(*values, training=False)

    def part(values: Values, own: OwnLoss) -> Any:
        return own.part(lambda: whole(values), counted=not LOSS_ONLY.isdisjoint(values.inputs.kwargs))

    return Trial(whole, part, values, harmless=True)


def _of_layers(layers: nn.Sequential, inputs: Inputs, rows: int) -> Trial | None:
    """On the layers; None if these are on ``meta``, or so inexact that other losses look equal."""
    parameters = list(layers.parameters())
    if any(each.is_meta or each.element_size() < 4 for each in parameters):
        return None
    generator = torch.Generator().manual_seed(0)
    values = Values(inputs, {}).mapped(lambda t: _more(t, rows, generator))

    def part(values: Values, own: OwnLoss) -> Any:
        layers[-1].__dict__["own_loss"] = own
        with own.wanted():
            return in_a_row(layers, values.inputs)

    harmless = all(each.device.type == "cpu" for each in parameters)
    return Trial(lambda values: in_a_row(layers, values.inputs), part, values, harmless)


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

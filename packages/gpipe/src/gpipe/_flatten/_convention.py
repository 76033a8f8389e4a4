"""Try out whether a model computes its loss by the convention of ``num_items_in_batch``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..engine._loss_value import own_loss
from ._ending import BLOCK, Ending, Returned
from ._inputs import Inputs
from ._own_loss import IGNORED, LOSS_ONLY, Convention
from ._segment import Segment

ROWS = 3
ITEMS = 7.0


class Values(NamedTuple):
    """What a loss is computed from: the inputs, and what modules returned."""

    inputs: Inputs
    returned: Returned

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Values:
        args, kwargs, returned = _pytree.tree_map_only(Tensor, change, (*self.inputs, self.returned))
        return Values(Inputs(args, kwargs), returned)

    def part(self, rows: Sequence[int]) -> Values:
        def taken(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] % ROWS:
                return tensor
            return tensor.reshape(ROWS, -1, *tensor.shape[1:])[list(rows)].flatten(0, 1)

        return self.mapped(taken)

    def variants(self, constants: set[int]) -> Iterator[Values]:
        """Others, in which a part of the first row of a tensor is one of ``constants``, and may not count therefore."""
        leaves, tree = self.inputs.leaves()
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim():
                for constant in sorted(constants):
                    tensor = leaf.clone()
                    tensor[_half_a_row(tensor)] = constant
                    yield self._replace(inputs=Inputs(*tree.value([*leaves[:k], tensor, *leaves[k + 1 :]])))

    def with_every_label(self, classes: int) -> Values:
        """With labels of so many classes, each once if there are as many labels."""
        labels = self.inputs.kwargs["labels"]
        every = (torch.arange(labels.numel()) % max(1, classes)).reshape(labels.shape).to(labels)
        return self._replace(inputs=self.inputs._replace(kwargs={**self.inputs.kwargs, "labels": every}))

    def with_items(self, items: float) -> Values:
        kwargs = {**self.inputs.kwargs, **dict.fromkeys(LOSS_ONLY, torch.tensor(items))}
        return self._replace(inputs=self.inputs._replace(kwargs=kwargs))


Loss = Callable[[Values], Tensor | None]
"""The loss for some values; None if there is none."""


def convention_of(ending: Ending, segment: Segment, inputs: Inputs, returned: Returned) -> Convention | None:
    """The convention by which a model computes its loss, tried on random numbers in place of what modules returned.

    On the CPU; in both modes of the model, which must agree, unless it draws random numbers in training.
    """
    labels = inputs.kwargs.get("labels")
    if not isinstance(labels, Tensor) or not labels.dim() or labels.is_floating_point():
        return None
    rows, generator = inputs.rows(), torch.Generator().manual_seed(0)
    values = Values(
        Values(inputs, {}).mapped(lambda tensor: _more(_moved(tensor), rows, generator)).inputs,
        {key: _random(tensor, rows, generator) for key, tensor in returned.items()},
    )
    padded = values.inputs.kwargs["labels"].clone()
    padded[_half_a_row(padded)] = IGNORED
    values.inputs.kwargs["labels"] = padded
    local = cache(_moved)

    def loss_of(training: bool) -> Loss:
        net = _local(ending.net(segment), training)

        def loss(values: Values) -> Tensor | None:
            try:
                found = own_loss(segment.pick(ending(segment, *values, net=net, local=local)))
            except Exception:  # a model may raise anything for labels that it does not know
                return None
            return found.double() if bool(found.isfinite()) else None

        return loss

    with torch.no_grad():
        evaluated, trained = loss_of(False), loss_of(True)
        # A balancing loss of experts is a product of means, and may be so small that those of parts seem to add up.
        routers = {key for key, tensor in values.returned.items() if key[0] != BLOCK and len(tensor) != ROWS}
        known = {key: tensor * (math.nan if key in routers else 1) for key, tensor in values.returned.items()}
        if routers and not _same(evaluated(values), evaluated(values._replace(returned=known))):
            return None
        sizes = {tensor.shape[-1] for tensor in values.returned.values()} | _sizes(segment.net)
        tried = [
            values,
            *values.variants({0, 1, IGNORED, *_special(segment.net)}),
            *map(values.with_every_label, sizes),
        ]
        found = next((each for each in map(Convention, (1, 0)) if _holds(each, evaluated, values)), None)
        if found is None or not all(_holds(found, evaluated, each) for each in tried if evaluated(each) is not None):
            return None
        if not _same(trained(values), trained(values)):
            return found
        return found if all(_holds(found, trained, each) for each in tried if trained(each) is not None) else None


def _holds(convention: Convention, loss: Loss, values: Values) -> bool:
    """Whether ``loss`` is a sum over labels by the number of items, and by default by the labels that count."""
    by_one, by_items = loss(values.with_items(1.0)), loss(values.with_items(ITEMS))
    parts = [loss(values.part(rows).with_items(1.0)) for rows in ([0], [1, 2])]
    plain, count = loss(values), float(convention.count(values.inputs.kwargs["labels"]))
    if by_one is None or by_items is None or plain is None or None in parts:
        return False
    alike = (by_items * ITEMS, plain * count, sum(each for each in parts if each is not None))
    return all(torch.allclose(by_one, torch.as_tensor(each), rtol=1e-5, atol=1e-7) for each in alike)


def _half_a_row(tensor: Tensor) -> Any:
    return 0 if tensor.dim() == 1 else (0, ..., slice(tensor.shape[-1] // 2, None))


def _special(model: nn.Module) -> set[int]:
    """The numbers of tokens with a meaning of their own, such as padding, by the configurations of ``model``."""
    found = set[int]()
    for module in model.modules():
        config = vars(module).get("config")
        for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
            if type(value) is int and ("token" in name or name.endswith(("_id", "_index"))):
                found.add(value)
    return found


def _sizes(model: nn.Module) -> set[int]:
    """How many words or classes there may be, by the layers of ``model`` and their configurations."""
    configs = [vars(module).get("config") for module in model.modules()]
    return {size for config in configs if isinstance(size := getattr(config, "vocab_size", None), int)}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


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

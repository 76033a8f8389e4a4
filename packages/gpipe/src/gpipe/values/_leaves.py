"""Activations: the values sent between stages, detached from the graph that computed them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from microbatch import Arguments as Arguments
from microbatch import flatten, is_flat, unflatten


def storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlap, so that a clone has the same strides."""
    # torch.empty_like keeps the strides of such tensors. An expanded tensor without elements counts as contiguous.
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class Activation:
    """A micro-batch's value, which one stage sends to the next, with the list of its tensors.

    Args:
        tensors: the tensors in ``value``, in tree order. By default, they are collected from ``value``.
        marks: one per tensor, telling what else uses its memory (:mod:`gpipe.values._sharing`); empty if nothing does.
    """

    __slots__ = ("marks", "tensors", "value")

    def __init__(self, value: Any, tensors: tuple[Tensor, ...] | None = None, marks: Sequence[int] = ()) -> None:
        if tensors is None:
            tensors = (value,) if isinstance(value, Tensor) else get_tensors(value)
        self.value = value
        self.tensors = tensors
        self.marks = marks

    def with_tensors(self, tensors: Iterable[Tensor]) -> Activation:
        fresh = tuple(tensors)
        if isinstance(self.value, Tensor):
            return Activation(fresh[0], fresh, self.marks)
        value = fresh if self.value is self.tensors else _rebuilt(self.value, fresh)
        return Activation(value, fresh, self.marks)


def as_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as one value: a single positional one itself, others as :class:`Arguments`."""
    return args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)


def as_arguments(value: Any) -> Arguments:
    """Invert :func:`as_value`."""
    return value if isinstance(value, Arguments) else Arguments((value,), {})


def get_tensors(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    return value if is_flat(value) else tuple([leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)])


def _rebuilt(value: Any, tensors: Iterable[Tensor]) -> Any:
    leaves, tree = flatten(value)
    fresh = iter(tensors)
    return unflatten([next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def own_memory(found: Sequence[Tensor | None], kept: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Clone gradients in ``found`` that share a storage with ``kept`` or each other: the receiver may modify them."""
    taken = {storage_id(gradient) for gradient in kept if gradient is not None}
    gradients: list[Tensor | None] = []
    for gradient in found:
        if gradient is not None and storage_id(gradient) in taken:
            gradient = gradient.clone()
        taken.update([] if gradient is None else [storage_id(gradient)])
        gradients.append(gradient)
    return gradients


def like_accumulated(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Return ``gradient`` with the strides that autograd would give ``leaf.grad``; rounding may depend on them."""
    if gradient is None or gradient.layout is not torch.strided or gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf, requires_grad=False).copy_(gradient)


def accumulate_gradient(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Return a captured ``gradient`` as it would be in ``leaf.grad``, added to a gradient that is there already.

    A layer that calls backward() itself may have left one.
    """
    before, gradient = leaf.grad, like_accumulated(gradient, leaf)
    return gradient if before is None else before if gradient is None else before + gradient


Apply = Callable[[Callable[[Tensor], Tensor], Iterable[Tensor]], Iterable[Tensor]]
"""Applies a function to each tensor: ``map``, or :func:`map_once`."""


def map_once(function: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Do the same as ``map``, but call ``function`` once for a tensor that occurs several times."""
    given = [*tensors]
    found = {id(tensor): function(tensor) for tensor in {id(tensor): tensor for tensor in given}.values()}
    return [found[id(tensor)] for tensor in given]


def detach_leaves(activation: Activation, apply: Apply = map) -> Activation:
    """Detach all tensors, so that they are leaves of a new graph, and keep their ``requires_grad``."""
    value = activation.value
    if isinstance(value, Tensor):
        return Activation(value.detach().requires_grad_(value.requires_grad), marks=activation.marks)
    return activation.with_tensors(apply(_detach, activation.tensors))


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def clone_leaves(activation: Activation) -> Activation:
    return activation.with_tensors(map(clone, activation.tensors))


def as_nonleaf(activation: Activation, apply: Apply = map) -> Activation:
    """Return the same tensors as non-leaves, because torch forbids in-place changes of leaves that require grad."""
    return activation.with_tensors(apply(_enter, activation.tensors))


def versions(activation: Activation) -> list[int]:
    """Return the version counter of each tensor."""
    try:
        return [*map(_version, activation.tensors)]
    except RuntimeError:  # inference tensors
        return [*map(version, activation.tensors)]


_version = attrgetter("_version")


def version(tensor: Tensor) -> int:
    """Return the version counter, or 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _enter(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor.detach()
    as_nonleaf: Tensor = AsNonleaf.apply(tensor)  # type: ignore[no-untyped-call]
    return as_nonleaf


class AsNonleaf(torch.autograd.Function):
    """The identity. Its output is not a leaf, and shares the version counter of its input."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # a missing gradient stays None instead of zeros
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


_OWN = getattr(AsNonleaf, "_backward_cls", None)


def is_custom(kind: type[Node]) -> bool:
    """Return whether nodes of this class are written in Python and are not :class:`AsNonleaf`'s own."""
    return issubclass(kind, BackwardCFunction) and kind is not _OWN

"""Compute the loss of a mini-batch once, on the outputs of all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..values._leaves import Activation, clone_leaves, storage_id
from ..values._sharing import clone_preserved
from ._accumulate import GradientSums
from ._loss_value import LossFunction, LossValue, whole_metrics
from ._losses import Losses, build_initial_gradient
from ._scale import DeviceScale, compute_scale, sum_counts


class WholeLoss(Losses):
    """One loss on the outputs of all micro-batches: correct for every function of outputs and targets.

    It holds the outputs of all micro-batches and their gradients, as the plain model does.

    Args:
        arguments: the further arguments of ``loss_fn``: the target, or nothing.
        join: joins the outputs of micro-batches differentiably, in the same way as the pipe.
        weight: the weight of the loss, from a ``normalizer``.
        unlike: returns the error for a :class:`LossSum`; None unless the caller passed ``reduction``.
    """

    is_whole = True

    def __init__(
        self,
        loss_fn: LossFunction,
        arguments: tuple[Any, ...],
        join: Callable[[Sequence[Activation]], Activation],
        *,
        weight: float = 1.0,
        unlike: Callable[[LossValue], ValueError] | None = None,
        keep_outputs: bool = False,
    ) -> None:
        super().__init__(loss_fn, keep_outputs=keep_outputs)
        self._arguments, self._join, self._weight, self._unlike = arguments, join, weight, unlike
        self._arrived: dict[int, Activation] = {}

    def take(self, i: int, activation: Activation) -> None:
        self._arrived[i] = activation
        self._keep(i, activation)

    def compute_whole(self) -> None:
        outputs = [self._arrived.pop(i) for i in sorted(self._arrived)]
        if len(outputs) == 1:  # several outputs are copied when they are joined
            outputs = [clone_leaves(outputs[0]) if self._keep_outputs else clone_preserved(outputs[0])]
        parts = _Parts(outputs)
        del outputs
        joined = self._join(parts.take())
        value = self._value(0, joined, self._arguments)
        self.is_sum = value.count is not None
        if self.is_sum and self._unlike is not None:
            raise self._unlike(value)
        self.metrics = None if value.metrics is None else whole_metrics(value.metrics)
        scale = compute_scale(sum_counts([value.count])) if self.is_sum else 1.0
        factor = scale.on(value.total.device) if isinstance(scale, DeviceScale) else scale
        whole = value.total.detach() * self._weight
        self.loss = (whole / sum_counts([value.count])).to(whole.dtype) if self.is_sum else whole
        if self.trains:
            total = value.total
            del value, joined  # the backward needs only tensors that the loss has saved
            self._backward(total, build_initial_gradient(total, factor * self._weight), [parts.anchor])
            self._gradients = dict(enumerate(parts.gradients(self._sums)))


class _Parts:
    """The outputs of micro-batches, which are freed once they are joined, and their gradients.

    Attributes:
        sizes: the number of tensors of each output.
        anchor: the leaf where a backward through the outputs ends.
    """

    def __init__(self, outputs: list[Activation]) -> None:
        self.sizes = [len(output.tensors) for output in outputs]
        self.anchor = torch.zeros(0, requires_grad=True)
        self._outputs = outputs
        self._found: dict[int, Tensor | None] = {}

    def take(self) -> list[Activation]:
        """Return the outputs, once. If they require grad, the nodes that produce them do not hold them."""
        outputs, self._outputs = self._outputs, []
        numbers = count()
        return [
            output.with_tensors([self._attach(tensor, next(numbers)) for tensor in output.tensors])
            for output in outputs
        ]

    def _attach(self, tensor: Tensor, number: int) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        attached: Tensor = _Part.apply(self.anchor, tensor.detach(), self._found, number)  # type: ignore[no-untyped-call]
        return attached

    def gradients(self, sums: GradientSums) -> Iterator[list[Tensor | None]]:
        """Yield the gradients of each micro-batch after the backward. A stage may overwrite them."""
        numbers, taken, kept = count(), set[tuple[int, int]](), sums.storages()
        for size in self.sizes:
            yield [_apart(self._found.pop(next(numbers), None), taken, kept) for _ in range(size)]


class _Part(torch.autograd.Function):
    """The identity, as a node that stores its gradient but not the tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, found: dict[int, Tensor | None], number: int) -> Tensor:
        ctx.found, ctx.number = found, number
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        ctx.found[ctx.number] = gradient
        return None, None, None, None


def _apart(gradient: Tensor | None, taken: set[tuple[int, int]], kept: set[int]) -> Tensor | None:
    """Return ``gradient``, or a clone if others use its memory, because the stage may overwrite it."""
    if gradient is None:
        return None
    storage = storage_id(gradient)
    place = storage, int(gradient.storage_offset()) if gradient.layout is torch.strided else 0
    if place in taken or storage in kept:
        return gradient.clone()
    taken.add(place)
    return gradient

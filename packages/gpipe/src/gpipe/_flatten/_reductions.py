"""By what the means of a loss are divided, seen while the loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Reductions(TorchFunctionMode):
    """While it is on, it observes the loss functions of ``torch.nn.functional``.

    A mean over nothing is 0 and not nan: a micro-batch in which no label counts adds nothing to the loss.

    Attributes:
        counts: for each mean what it divides by, on the device of the loss.
        sums: how many sums there were.
        divisors: tensors of one number by which something was divided by hand.
        is_cut: whether a number was cut off, as by ``clamp``, or compared, or a mean taken by hand of what a mask
            selects: losses of parts are then no parts of the loss. Also whether torch's CTC was computed, which reads
            beyond its memory if labels are tried that do not exist.
    """

    # Of what the loss compares something with: numbers, and tensors that are read only where a loss is tried.
    _compared: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Tensor] = []
        self.sums = 0
        self.divisors: list[Tensor] = []
        self.is_cut = self._selects = False
        self._compared = []

    def any(self) -> bool:
        return bool(self.counts) or self.sums > 0

    def constants(self) -> set[int]:
        numbers = [each.item() if isinstance(each, Tensor) else each for each in self._compared]
        return {int(each) for each in numbers if abs(each) < 2**31}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Two flags of older code choose another reduction, which is tried as if it were computed by hand.
        is_old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
        reduction = None if is_old else kwargs.get("reduction")
        count_of = _COUNTS.get(function) if reduction == "mean" else None
        count = None if count_of is None else count_of(*args, **kwargs).detach()
        if count_of is _labels and count is not None and not args[1].is_floating_point():
            # Where nothing counts, as where all weights are 0, no label may: gradients would be 0 times nan.
            args = args[0], args[1].where(count > 0, kwargs.get("ignore_index", -100))
        found = function(*args, **kwargs)
        name = getattr(function, "__name__", "").strip("_")
        number = next(iter(args), None) if name in _COMPARISONS else found if name in _CUTS else None
        self.is_cut |= isinstance(number, Tensor) and not number.dim() and number.is_floating_point()
        self._selects |= name == "masked_select" or (name == "getitem" and _is_mask(args[1]))
        self.is_cut |= name == "mean" and self._selects and not found.dim()
        if name in _DIVISIONS:
            self.divisors += [each for each in args[_DIVISIONS[name] :][:1] if _is_single(each)]
        if name in _COMPARISONS:
            self._compared += [each for each in (*args, *kwargs.values()) if _is_number(each)]
        if "reduction" not in kwargs or getattr(function, "__module__", None) != F.__name__:
            return found
        self._compared.append(kwargs.get("ignore_index", -100))
        self.sums += reduction == "sum"
        if count is None:
            return found
        # Half precision cannot count.
        count = count.to(found.device, torch.promote_types(found.dtype, torch.float32))
        self.counts.append(count)
        # Not a sum divided later: in half precision that overflows where the mean does not.
        return torch.where(count > 0, found, torch.zeros_like(found))


_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_CUTS = {"abs", "clamp", "clamp_max", "clamp_min", "clip", "ctc_loss", "max", "maximum", "min", "minimum", "nanmean"}
_CUTS |= {"nansum", "relu", "where"}
_DIVISIONS = {**dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv"), 1), "reciprocal": 0, "rdiv": 0}
"""Which argument they divide by."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or _is_single(value)


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim()


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool


def _labels(
    input: Tensor,  # noqa: A002 — as in torch
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    **options: object,
) -> Tensor:
    """How many labels count, or the sum of the weights of their classes."""
    if target.is_floating_point():  # a probability for each class
        return _full(input, input.numel() // input.shape[min(1, input.dim() - 1)])
    counted = target != ignore_index
    return counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()


def _elements(
    input: Tensor,  # noqa: A002 — as in torch
    target: Tensor,
    **options: object,
) -> Tensor:
    return _full(input, torch.broadcast_shapes(input.shape, target.shape).numel())  # type: ignore[no-untyped-call]


def _full(like: Tensor, value: int) -> Tensor:
    return torch.full((), value, device=like.device)


_COUNTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.cross_entropy: _labels,
    F.nll_loss: _labels,
    F.binary_cross_entropy: _elements,
    F.binary_cross_entropy_with_logits: _elements,
    F.kl_div: _elements,
    F.l1_loss: _elements,
    F.mse_loss: _elements,
    F.smooth_l1_loss: _elements,
    F.huber_loss: _elements,
}
"""What the mean of each function divides by."""

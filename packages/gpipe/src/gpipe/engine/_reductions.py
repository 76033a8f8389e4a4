"""By what the means of a loss are divided, seen while the loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SeenMean(NamedTuple):
    """A mean.

    Attributes:
        results: the mean, and what is the same number, in another form or times constants: the ``factors``.
        divisor: what it divides by: a number, or a tensor on an accelerator, which is not waited for.
        counts: whether that depends on values, such as labels that count, and not on shapes alone.
    """

    results: list[Tensor]
    divisor: Tensor | float
    counts: bool
    factors: list[Any]


class Reductions(TorchFunctionMode):
    """While it is on, it observes the loss functions of ``torch.nn.functional``.

    A mean over nothing is 0 and not nan: a micro-batch in which no label counts adds nothing to the loss.

    Attributes:
        means: those that were computed.
        sums: how many sums there were.
        divisors: tensors of one number by which something was divided by hand.
        counted: numbers by which means were taken by hand: those from a sum, such as that of a mask, and how much a
            mask selects.
        is_cut: whether a number was cut off, as by ``clamp``, or compared, or a mean taken by hand of what a mask
            selects: losses of parts are then no parts of the loss. Also whether torch's CTC was computed, which reads
            beyond its memory if labels are tried that do not exist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.means: list[SeenMean] = []
        self.sums = 0
        self.divisors: list[Tensor] = []
        self.counted: list[Any] = []
        self._from_sums: list[Any] = []
        self.is_cut = self._selects = False
        # What the loss compares something with: numbers, and tensors that are read only where a loss is tried.
        self._compared: list[Any] = []

    def any(self) -> bool:
        return bool(self.means) or self.sums > 0

    def constants(self) -> set[int]:
        numbers = [each.item() if isinstance(each, Tensor) else each for each in self._compared]
        return {int(each) for each in numbers if abs(each) < 2**31}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_loss = "reduction" in kwargs and getattr(function, "__module__", None) == F.__name__
        result = self._loss(function, args, kwargs) if is_loss else function(*args, **kwargs)
        self._note(getattr(function, "__name__", "").strip("_"), args, kwargs, result)
        return result

    def _loss(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a loss function of torch."""
        # Two flags of older code choose another reduction, which is tried as if it were computed by hand.
        is_old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
        reduction, ignored = None if is_old else kwargs["reduction"], kwargs.get("ignore_index", -100)
        self.sums += reduction == "sum"
        self._compared.append(ignored)
        if reduction != "mean" or function not in _COUNTS:
            return function(*args, **kwargs)
        found = _COUNTS[function](*args, **kwargs)
        count = known(found)
        if isinstance(found, Tensor) and (isinstance(count, Tensor) or not count):
            # Where nothing counts, as where all weights are 0, no label may: gradients would be 0 times nan.
            args = args[0], args[1].where(found > 0, ignored)
        result = function(*args, **kwargs)
        # Not a sum divided later: in half precision that overflows where the mean does not.
        if isinstance(count, Tensor):
            count = count.to(result.device, torch.promote_types(result.dtype, torch.float32)).detach()
            result = torch.where(count > 0, result, torch.zeros_like(result))
        elif not count:
            result = result.masked_fill(torch.ones_like(result, dtype=torch.bool), 0.0)  # with its graph
        self.means.append(SeenMean([result], count, isinstance(found, Tensor), []))
        return result

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note what is computed by hand: by the function of that ``name``."""
        number = next(iter(args), None) if name in _COMPARISONS else result if name in _CUTS else None
        self.is_cut |= isinstance(number, Tensor) and not number.dim() and number.is_floating_point()
        self._selects |= name == "masked_select" or (name == "getitem" and _is_mask(args[1]))
        if name == "mean" and self._selects and not result.dim():
            self.is_cut = True
            self.counted.append((args or (*kwargs.values(),))[0].numel())
        if name in _DIVISIONS:
            self.divisors += [each for each in args[_DIVISIONS[name] :][:1] if _is_single(each)]
            self.counted += [each for each in args[_DIVISIONS[name] :][:1] if self._is_from_sum(each)]
        if name in _COMPARISONS:
            self._compared += [each for each in (*args, *kwargs.values()) if _is_number(each)]
        self._follow(name, args, result)

    def _follow(self, name: str, args: Any, result: Any) -> None:
        """Follow sums to where something is divided by them, and means to what the loss returns."""
        if _is_number(result) and (name in _SUMS or any(map(self._is_from_sum, args))):
            self._from_sums.append(result)  # also as a number of Python, as by int(mask.sum())
        is_one = isinstance(result, Tensor) and result.numel() == 1
        for mean in self.means if is_one and (name in _SAME or name in _SCALES) else ():
            if any(each is args[0] for each in mean.results) and all(map(_is_constant, args[1:])):
                mean.results.append(result)
                mean.factors.extend(args[1:] if name in _SCALES else ())

    def _is_from_sum(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return any(value is each for each in self._from_sums)
        return _is_number(value) and value in [each for each in self._from_sums if not isinstance(each, Tensor)]


def known(number: Any) -> Any:
    """A ``number``, read from its tensor if nothing has to be waited for, and it has a value."""
    is_here = type(number) is Tensor and number.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
    return number.item() if is_here else number


_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_CUTS = {"abs", "clamp", "clamp_max", "clamp_min", "clip", "ctc_loss", "max", "maximum", "min", "minimum", "nanmean"}
_CUTS |= {"nansum", "relu", "where"}
_DIVISIONS = {**dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv"), 1), "reciprocal": 0, "rdiv": 0}
"""Which argument they divide by."""
_SCALES = {"mul", "multiply", "rmul", *_DIVISIONS} - {"reciprocal", "rdiv"}
_SAME = {"clone", "double", "float", "mean", "neg", "negative", "reshape", "squeeze", "sum", "to", "view"}
_SUMS = {"count_nonzero", "sum"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or _is_single(value)


def _is_constant(value: Any) -> bool:
    """Whether it does not depend on labels and outputs, or is a number that is compared with those of other parts."""
    return _is_number(value) or not isinstance(value, Tensor)


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim()


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool


def _labels(
    scores: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100, **options: object
) -> Tensor | int:
    """How many labels count, or the sum of the weights of their classes."""
    if target.is_floating_point():  # a probability for each class
        return scores.numel() // scores.shape[min(1, scores.dim() - 1)]
    counted = target != ignore_index
    return counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()


def _elements(found: Tensor, target: Tensor, **options: object) -> int:
    if found.shape == target.shape:  # else this takes as long as a small loss
        return found.numel()
    return torch.broadcast_shapes(found.shape, target.shape).numel()  # type: ignore[no-untyped-call, no-any-return]


_COUNTS: dict[Callable[..., Any], Callable[..., Tensor | int]] = {
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
"""What the mean of each function divides by. Torch passes its input and target by position, however it is called."""

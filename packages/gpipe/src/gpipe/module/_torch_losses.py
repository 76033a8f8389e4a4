"""Combine the micro-batch losses of torch's own loss functions, whose divisors are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from microbatch import Split

_WITH_LINEAR: Any = getattr(nn, "LinearCrossEntropyLoss", None)  # since torch 2.13
_LABELS = (F.cross_entropy, F.nll_loss, *([F.linear_cross_entropy] if _WITH_LINEAR else []))
_ELEMENTS = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
)
_FUNCTIONS: Mapping[type[nn.Module], Callable[..., Any]] = {
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.HuberLoss: F.huber_loss,
    nn.KLDivLoss: F.kl_div,
    nn.L1Loss: F.l1_loss,
    nn.MSELoss: F.mse_loss,
    nn.NLLLoss: F.nll_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    **({_WITH_LINEAR: F.linear_cross_entropy} if _WITH_LINEAR else {}),
}
"""The function that a module of exactly this class calls with its attributes."""


class TorchLoss(NamedTuple):
    """A loss of torch.

    Attributes:
        loss_fn: the loss function of the caller, called with an output and a target.
        function: the function of ``torch.nn.functional`` that ``loss_fn`` is or calls.
        options: the keywords of ``function``.
        dim: the dimension of the target along which rows are split.
    """

    loss_fn: Callable[..., Any]
    function: Callable[..., Any]
    options: Mapping[str, Any]
    dim: int = 0

    @property
    def adds(self) -> bool:
        """True if the loss is a sum."""
        return self.options.get("reduction") == "sum"

    def is_over_labels(self, target: Tensor) -> bool:
        """Return whether the loss is a mean over non-ignored labels, and not over rows."""
        return self.function in _LABELS and not self.adds and not target.is_floating_point()

    def of_rows(self, output: Tensor, target: Tensor) -> Any:
        """Compute the loss of a micro-batch: a sum, or a mean to be weighted by rows."""
        alike = isinstance(output, Tensor) and output.dim() == target.dim()
        alike = alike and output.shape[self.dim] == target.shape[self.dim]
        if self.function in _ELEMENTS and not alike:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"loss_fn compares an output of {shape} with a target of {tuple(target.shape)}, so rows would be "
                "broadcast within a micro-batch; reshape one of them. If this is intended, wrap the loss, as in lambda "
                "output, target: F.mse_loss(output, target), so that it is called once for the full mini-batch"
            )
        return self.loss_fn(output, target)

    def compute_mean(self, output: Tensor, target: Tensor, count: Any, every: Any) -> Tensor:
        """Compute the mean over the ``count`` non-ignored labels of a micro-batch, or the total of their weights.

        An empty mean is 0; if ``every``, the total of the mini-batch, is 0, it is NaN, and gradients are zeros, as in
        torch. Counts on accelerators are not synchronized with the host.
        """
        known = not isinstance(count, Tensor)
        if not known or not count:
            # If all weights are 0, the labels must be ignored as well: gradients would be 0 times NaN.
            target = target.where(torch.as_tensor(count, device=target.device) > 0, self._ignored)
        mean: Tensor = self.loss_fn(output, target)
        if not known or not count:
            mean = torch.where(torch.as_tensor(count, device=mean.device) > 0, mean, torch.zeros_like(mean))
        if not known or not every:
            missing = torch.as_tensor(every, device=mean.device) == 0
            mean = mean + torch.zeros_like(mean).masked_fill(missing, torch.nan)
        return mean

    def counts(self, target: Tensor, sizes: Sequence[int]) -> list[Any]:
        """Return the number of non-ignored labels in each part of ``target``, or the sum of their class weights.

        Args:
            sizes: the number of rows of each part.

        Returns:
            A number per part if ``target`` is on the CPU, else a scalar tensor per part.
        """
        weight, counted = self.options.get("weight"), target != self._ignored
        if weight is not None:
            counted = weight.detach().to(target.device)[target.where(counted, 0)] * counted
        parts = [part.sum() for part in torch.split(counted, list(sizes), self.dim)]
        return [part.item() for part in parts] if target.device.type == "cpu" else parts

    @property
    def _ignored(self) -> int:
        index = self.options.get("ignore_index")
        return -100 if index is None else int(index)


def torch_loss(loss_fn: Any, target: Any) -> tuple[TorchLoss, Tensor] | None:
    """Return ``loss_fn`` as a loss of torch, with its target; None unless it **is** one, and the parts' losses add up.

    Args:
        target: a tensor, or a ``Split`` around one.
    """
    found, dim = _read(loss_fn), 0
    if isinstance(target, Split) and target.counts is None:
        target, dim = target.value, target.dim
    if found is None or not isinstance(target, Tensor) or not -target.dim() <= dim < target.dim():
        return None
    found = found._replace(dim=dim)
    options = found.options
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return None
    if options.get("reduction", "mean") not in ("mean", "sum", *(("batchmean",) if found.function is F.kl_div else ())):
        return None
    if not _adds_up(found, target):
        return None
    return (found, target) if all(_is_of_classes(found, *option, target) for option in options.items()) else None


def _adds_up(loss: TorchLoss, target: Tensor) -> bool:
    """Return whether the losses of parts of ``target`` determine the loss."""
    options = loss.options
    if loss.function not in _LABELS:
        # "batchmean" divides by the size of dimension 0.
        return options.get("reduction") != "batchmean" or loss.dim % target.dim() == 0
    if target.is_floating_point():
        return target.dim() > 1  # a single row of probabilities would be split by classes
    # Label smoothing contributes to rows with weight 0, and smaller dtypes may not represent ignore_index.
    return target.dtype == torch.int64 and (options.get("weight") is None or not options.get("label_smoothing"))


def is_of_torch(loss_fn: Any) -> bool:
    return _read(loss_fn) is not None


def _read(loss_fn: Any) -> TorchLoss | None:
    function, options = loss_fn, {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        function, options = loss_fn.func, loss_fn.keywords
    elif type(loss_fn) in _FUNCTIONS and not _is_changed(loss_fn):
        function = _FUNCTIONS[type(loss_fn)]
        options = {**loss_fn._buffers, **{name: vars(loss_fn)[name] for name in vars(loss_fn) if name in _OPTIONS}}
    # Libraries replace torch's functions with their own.
    is_own = getattr(function, "__module__", None) == F.__name__ and function in (*_LABELS, *_ELEMENTS)
    return TorchLoss(loss_fn, function, options) if is_own else None


_OPTIONS = ("ignore_index", "label_smoothing", "log_target", "reduction")


def _is_changed(module: nn.Module) -> bool:
    """Return whether a loss module has hooks, or anything else that its class does not define."""
    if type(module) is _WITH_LINEAR and type(module.linear) is nn.Linear:
        return _has_own(module, *_HOOKS) or _has_own(module.linear, *_HOOKS)
    return _has_own(module, *_HOOKS, "_parameters", "_modules")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_own(module: nn.Module, *names: str) -> bool:
    return "forward" in vars(module) or any(vars(module).get(name) for name in names)


def _is_of_classes(loss: TorchLoss, name: str, value: Any, target: Tensor) -> bool:
    """Return whether an option of a loss applies to every row, such as a weight per class."""
    if not isinstance(value, Tensor):
        return True
    if value.requires_grad:
        return False
    if loss.function in _LABELS:
        return name == "weight"
    return name == "pos_weight" and (value.numel() == 1 or value.dim() < target.dim() - loss.dim % target.dim())

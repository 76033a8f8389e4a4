"""torch's own losses, and what the mean of each divides by: so it is known how those of micro-batches add up."""

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
"""What a module of exactly that class calls with its attributes."""


class TorchLoss(NamedTuple):
    """A loss of torch.

    Attributes:
        loss_fn: what is called with an output and a target.
        function: the function of ``torch.nn.functional`` that it is.
        options: the keywords of that function.
        dim: the dimension of the rows of its target.
    """

    loss_fn: Callable[..., Any]
    function: Callable[..., Any]
    options: Mapping[str, Any]
    dim: int = 0

    @property
    def adds(self) -> bool:
        """Whether it is a sum."""
        return self.options.get("reduction") == "sum"

    def is_over_labels(self, target: Tensor) -> bool:
        """Whether its mean is over labels that count, and not over rows."""
        return self.function in _LABELS and not self.adds and not target.is_floating_point()

    def of_rows(self, output: Tensor, target: Tensor) -> Any:
        """The loss of a micro-batch: a sum, or a mean that is weighted by rows."""
        alike = isinstance(output, Tensor) and output.dim() == target.dim()
        alike = alike and output.shape[self.dim] == target.shape[self.dim]
        if self.function in _ELEMENTS and not alike:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"loss_fn compares an output of {shape} with a target of {tuple(target.shape)}: rows of a micro-batch "
                "would be compared with others; reshape one of them. If that is meant, give a function that calls "
                "torch's, as in lambda output, target: F.mse_loss(output, target), which gets all rows at once"
            )
        return self.loss_fn(output, target)

    def counted(self, output: Tensor, target: Tensor, count: Any, every: Any) -> Tensor:
        """The mean of a micro-batch in which ``count`` labels count, of ``every`` one in the mini-batch.

        A mean over nothing is 0, and nan if nothing at all counts, with gradients of zeros, as torch's. Counts on
        accelerators are not waited for.
        """
        known = not isinstance(count, Tensor)
        if not known or not count:
            # As where all weights are 0, no label may count: gradients would be 0 times nan.
            target = target.where(torch.as_tensor(count, device=target.device) > 0, self._ignored)
        mean: Tensor = self.loss_fn(output, target)
        if not known or not count:
            mean = torch.where(torch.as_tensor(count, device=mean.device) > 0, mean, torch.zeros_like(mean))
        if not known or not every:
            missing = torch.as_tensor(every, device=mean.device) == 0
            mean = mean + torch.zeros_like(mean).masked_fill(missing, torch.nan)
        return mean

    def counts(self, target: Tensor, sizes: Sequence[int]) -> list[Any]:
        """How much counts in each part of ``target``, of so many rows: labels, or the sum of weights of their classes.

        Numbers if it is on the CPU, else tensors.
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
    """``loss_fn`` as a loss of torch, if it **is** one, and the losses of rows of its target add up to it; the target.

    ``target`` may be in a ``Split``.
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
    """Whether parts of ``target`` have all that a part of the loss needs to know."""
    options = loss.options
    if loss.function not in _LABELS:
        # It divides by the size of dimension 0.
        return options.get("reduction") != "batchmean" or loss.dim % target.dim() == 0
    if target.is_floating_point():
        return target.dim() > 1  # of one row of probabilities, the classes would be cut
    # Smoothing adds to rows that the weights leave out; and labels in fewer bits have other values.
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
    # Libraries put functions of their own in the place of torch's.
    is_own = getattr(function, "__module__", None) == F.__name__ and function in (*_LABELS, *_ELEMENTS)
    return TorchLoss(loss_fn, function, options) if is_own else None


_OPTIONS = ("ignore_index", "label_smoothing", "log_target", "reduction")


def _is_changed(module: nn.Module) -> bool:
    """Whether it does more than its class says."""
    if type(module) is _WITH_LINEAR and type(module.linear) is nn.Linear:
        return _has_own(module, *_HOOKS) or _has_own(module.linear, *_HOOKS)
    return _has_own(module, *_HOOKS, "_parameters", "_modules")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_own(module: nn.Module, *names: str) -> bool:
    return "forward" in vars(module) or any(vars(module).get(name) for name in names)


def _is_of_classes(loss: TorchLoss, name: str, value: Any, target: Tensor) -> bool:
    """Whether a tensor among the options of a loss has a value for each class, and not one for each row."""
    if not isinstance(value, Tensor):
        return True
    if value.requires_grad:
        return False
    if loss.function in _LABELS:
        return name == "weight"
    return name == "pos_weight" and (value.numel() == 1 or value.dim() < target.dim() - loss.dim % target.dim())

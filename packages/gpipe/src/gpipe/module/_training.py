"""What ``step`` and ``evaluate`` share: targets, losses, and return values."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from microbatch import Batch, Split, map_tensors, rules
from streams import add_note

from .._flatten._own_loss import OwnLoss
from ..engine._loss_value import LossFunction, own_loss
from ..engine._losses import Losses, LossStage
from ..engine._weights import ObservedLoss
from ..values._sharing import gathered
from ._cut import checked, cut, expect_same_rows
from ._keywords import Call
from ._signature import binds

_log = logging.getLogger("gpipe")
Kind = TypeVar("Kind", bound=Losses)


def expect_grad_mode() -> None:
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "step() trains, but grad mode is off; leave torch.no_grad(), or call pipe.evaluate(...) for the loss or "
            "the pipe for its output"
        )


def tell_of_settings(*, training: bool, chunks: int, stages: int, is_patched: bool) -> None:
    """Log what is right, but seldom meant."""
    if is_patched:
        _log.warning(
            "step() does not call the forward that was set on this pipe, as accelerate sets one for mixed precision; "
            "put autocast around step(), or use pipe(input) and backward()"
        )
    if not training:
        _log.warning(
            "step() trains a model in evaluation mode, as from_pretrained() returns it: without dropout and "
            "checkpointing; call pipe.train() before"
        )
    if chunks == 1 and stages > 1:
        _log.warning(
            "with chunks=1 nothing overlaps: %d stages compute one after the other; set pipe.chunks, to four for each "
            "stage to begin with",
            stages,
        )


def losses_of(
    kind: type[Kind],
    call: Call,
    batches: Sequence[Batch],
    chunks: int,
    device: torch.device,
    own: OwnLoss | None = None,
) -> Kind:
    """An object that computes the losses of ``batches``, on ``device``; ``own`` combines those of a model."""
    loss_fn = own_loss if call.loss_fn is None else call.loss_fn
    arguments = _arguments(call.loss_fn, call.target, batches, chunks, device)
    weights = _weights(batches, call.reduction, call.normalizer)
    rows = [batch.rows for batch in batches]
    if own is not None:
        _expect_defaults(call)
        return kind(own.whole(), [(share,) for share in weights], [1.0] * len(batches), rows)
    is_mean = call.reduction == "mean"
    if is_mean and call.loss_fn is not None and len(batches) > 1:
        loss_fn = ObservedLoss(call.loss_fn)
        arguments = [(*own, share) for own, share in zip(arguments, weights, strict=True)]
    return kind(loss_fn, arguments, weights, rows, keep_outputs=call.return_outputs, is_mean=is_mean)


def _expect_defaults(call: Call) -> None:
    if call.reduction != "mean" or call.normalizer is not None:
        raise ValueError(
            "reduction= and normalizer= go with a loss_fn; the model computes this loss, which is that of the whole "
            "mini-batch, also if num_items_in_batch is given: leave them out"
        )
    if call.return_outputs:
        raise ValueError(
            "return_outputs=True goes with a loss_fn; the output of this pipe is the loss that the model computes: "
            "leave it out, or call pipe(**batch) for the other fields"
        )


def returned(losses: Losses, batches: Sequence[Batch], out_spec: Any, with_outputs: bool, *, has_outputs: bool) -> Any:
    """The loss; with metrics if there are any, and perhaps with outputs: None where another process has these."""
    found: list[Any] = [losses.loss]
    if losses.metrics is not None:
        found.append(losses.metrics)
    if with_outputs:
        found.append(_outputs(losses, batches, out_spec) if has_outputs else None)
    return found[0] if len(found) == 1 else tuple(found)


def _outputs(losses: Losses, batches: Sequence[Batch], out_spec: Any) -> Any:
    try:
        return gathered([losses.outputs[i] for i in range(len(batches))], batches, out_spec)
    except (TypeError, ValueError) as error:
        if isinstance(losses, LossStage):
            add_note(error, "the step itself is complete: its gradients are in .grad")
        raise


def _arguments(
    loss_fn: LossFunction | None, target: Any, batches: Sequence[Batch], chunks: int, device: torch.device
) -> list[tuple[Any, ...]]:
    alone = takes_output_alone(loss_fn, target)
    if target is None:
        return [() if alone else (None,)] * len(batches)
    return [(each,) for each in _targets(target, device, batches, chunks)]


def takes_output_alone(loss_fn: LossFunction | None, target: Any) -> bool:
    """Whether ``loss_fn`` is called with the output alone: there is no ``target``, and it does not require one.

    TypeError if it does not take the ``target``.
    """
    if loss_fn is None and target is not None:
        raise TypeError("a target is given, but no loss_fn that takes it; give loss_fn=..., or leave the target out")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the output and the target; got {loss_fn!r}")
    if loss_fn is None or target is None:
        return loss_fn is None or _takes(loss_fn, 1)
    if not _takes(loss_fn, 2) and _takes(loss_fn, 1):
        raise TypeError("a target is given, but loss_fn takes the output alone; let it take both, or leave it out")
    return False


def _takes(loss_fn: LossFunction, count: int) -> bool:
    """Whether ``loss_fn`` can be called with ``count`` arguments, as far as it says."""
    function: Any = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    code = getattr(function, "__code__", None)
    if code is not None and not code.co_flags & inspect.CO_VARARGS:  # a signature takes as long as two cells
        most: int = code.co_argcount - inspect.ismethod(function)
        return most - len(function.__defaults__ or ()) <= count <= most
    try:
        return binds(inspect.signature(function), *[None] * count)
    except (TypeError, ValueError):  # builtin functions need not say
        return True


def _weights(batches: Sequence[Batch], reduction: str, normalizer: float | Tensor | None) -> list[float]:
    """The weight of each micro-batch in the loss of the mini-batch."""
    divisor = 1.0 if normalizer is None else _number(normalizer)
    if divisor == 0:
        raise ValueError("normalizer must not be 0: it is what the sum of all losses is divided by")
    if reduction == "sum":
        return [1.0 / divisor] * len(batches)
    if reduction != "mean":
        raise ValueError(f"reduction must be 'mean' or 'sum'; got {reduction!r}")
    if normalizer is not None:
        raise ValueError("normalizer goes with reduction='sum'; a mean divides by the rows already")
    # The first number of rows is that of the samples, also where other tensors have several rows for each.
    rows = [batch.rows[0] for batch in batches]
    return [row / max(1, sum(rows)) for row in rows]


def _number(normalizer: Any) -> float:
    is_one = isinstance(normalizer, Real) or (isinstance(normalizer, Tensor) and normalizer.numel() == 1)
    if not is_one or (isinstance(normalizer, Tensor) and normalizer.is_complex()):
        raise TypeError(f"normalizer must be a real number, or a tensor of one; got {normalizer!r}")
    return float(normalizer)


def _targets(target: Any, device: torch.device, inputs: Sequence[Batch], chunks: int) -> list[Any]:
    value = checked(target, None, "target")
    # The loss is computed where the outputs are; a gradient of the target would have no way back from there.
    detached = value._replace(bare=map_tensors(Tensor.detach, value.bare))
    if value.spec is not None and not any(isinstance(rule, Split) for rule in rules(*value)):
        return [map_tensors(lambda tensor: tensor.to(device), detached.bare)] * len(inputs)
    targets, _ = cut(detached, device, chunks)
    expect_same_rows(targets, inputs)
    return [batch.value for batch in targets]

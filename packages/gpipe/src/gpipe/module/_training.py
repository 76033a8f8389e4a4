"""What ``step`` and ``evaluate`` share: targets, losses, and return values."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Batch, Split, map_tensors, rules, unwrap
from streams import add_note

from ..engine._loss_value import LossFunction, LossValue, own_loss
from ..engine._losses import Losses, MicrobatchLosses
from ..engine._whole_loss import WholeLoss
from ..values._sharing import gathered, gathered_activation
from ._cut import checked, cut, expect_same_rows
from ._keywords import Call
from ._rule import Rule
from ._signature import binds

_log = logging.getLogger("gpipe")
Unlike = Callable[[LossValue], ValueError]
Chunks = tuple[int, int]
"""How many micro-batches a mini-batch is cut into at most, and how many rows each of them needs."""


def expect_grad_mode() -> None:
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "step() trains, but grad mode is off; leave torch.no_grad(), or call pipe.evaluate(...) for the loss or "
            "the pipe for its output"
        )


def tell_of_settings(*, training: bool, is_patched: bool) -> None:
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


def tell_of_one(*, chunks: int, stages: int) -> None:
    """Log that a mini-batch is a single micro-batch, so that no two stages compute at a time."""
    if chunks == 1:
        _log.warning(
            "with chunks=1 nothing overlaps: %d stages compute one after the other; set pipe.chunks, to four for each "
            "stage to begin with",
            stages,
        )
    else:
        _log.warning(
            "a mini-batch of one row is one micro-batch, so that nothing overlaps: %d stages compute one after the "
            "other; give more rows, at least as many as chunks=%d; a row of several documents is cut between them by "
            "GPipe(..., in_spec=gpipe.Packed())",
            stages,
            chunks,
        )


def losses_of(
    call: Call, rule: Rule, batches: Sequence[Batch], chunks: Chunks, device: torch.device, error: Unlike
) -> MicrobatchLosses:
    """What computes the losses of ``batches`` on ``device``, each alone; ``error`` is for what the rule excludes."""
    arguments = _arguments(call.loss_fn, call.target, batches, chunks, device)
    if rule.more is not None:
        arguments = [(*own, *_moved(more, device)) for own, more in zip(arguments, rule.more, strict=True)]
    rows = [batch.rows for batch in batches]
    keeps = call.return_outputs
    weights = None if rule.weights is None else _moved(rule.weights, device)
    return MicrobatchLosses(rule.loss_fn, arguments, weights, rows, unlike=error, keep_outputs=keeps)


def _moved(values: Sequence[Any], device: torch.device) -> list[Any]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def whole_loss_of(
    call: Call, batches: Sequence[Batch], out_spec: Any, device: torch.device, error: Unlike
) -> WholeLoss:
    """What computes the loss of the mini-batch on ``device``, once, on the joined outputs of ``batches``."""
    loss_fn = own_loss if call.loss_fn is None else call.loss_fn
    arguments = whole_arguments(call, device)
    join = partial(gathered_activation, batches=batches, spec=out_spec)
    unlike = None if call.reduction is None else error
    weight, keeps = 1.0 / call.divisor, call.return_outputs
    return WholeLoss(loss_fn, arguments, join, weight=weight, unlike=unlike, keep_outputs=keeps)


def whole_arguments(call: Call, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of ``loss_fn`` after the output of the full mini-batch: the target, None or nothing."""
    alone = takes_output_alone(call.loss_fn, call.target)
    if call.target is None:
        return () if alone else (None,)
    target, _ = unwrap(call.target, None, "target")
    # A gradient of the target would have no way back from this device.
    return (map_tensors(lambda tensor: tensor.detach().to(device), target),)


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
        if losses.trains:
            add_note(error, "the step itself is complete: its gradients are in .grad")
        raise


def _arguments(
    loss_fn: LossFunction | None, target: Any, batches: Sequence[Batch], chunks: Chunks, device: torch.device
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


def _targets(target: Any, device: torch.device, inputs: Sequence[Batch], chunks: Chunks) -> list[Any]:
    value = checked(target, None, "target")
    # The loss is computed where the outputs are; a gradient of the target would have no way back from there.
    detached = value._replace(bare=map_tensors(Tensor.detach, value.bare))
    if value.spec is not None and not any(isinstance(rule, Split) for rule in rules(*value)):
        return [map_tensors(lambda tensor: tensor.to(device), detached.bare)] * len(inputs)
    targets, _ = cut(detached, device, *chunks)
    expect_same_rows(targets, inputs)
    return [batch.value for batch in targets]

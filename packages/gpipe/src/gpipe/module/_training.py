"""Helpers shared by ``step`` and ``evaluate``: targets, losses, and return values."""

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
from ..values._sharing import gather_activation, gather_outputs
from ._keywords import Call
from ._mixing import mixing_layers
from ._rule import Rule
from ._signature import binds
from ._split_batch import check_batch, expect_same_rows, split_batch

_log = logging.getLogger("gpipe")
Unlike = Callable[[LossValue], ValueError]
Chunks = tuple[int, int]
"""The maximum number of micro-batches, and the minimum number of rows per micro-batch."""


def expect_grad_mode() -> None:
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "step() trains, but grad mode is off; leave torch.no_grad(), or call pipe.evaluate(...) for the loss or "
            "the pipe for its output"
        )


def warn_about_settings(*, training: bool, is_patched: bool) -> None:
    """Warn about settings that are valid but probably unintended."""
    casts = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")  # the first one is CUDA's
    if is_patched and not casts:
        _log.warning(
            "step() does not call the forward that was set on this pipe, for example by accelerate for mixed "
            "precision; call step() under autocast, or use pipe(input) and backward()"
        )
    if not training:
        _log.warning(
            "step() is training a model in evaluation mode, as returned by from_pretrained(), without dropout and "
            "checkpointing; call pipe.train() first"
        )


def warn_of_one(*, chunks: int, stages: int) -> None:
    """Warn that a mini-batch is a single micro-batch, so that no two stages compute at the same time."""
    if chunks == 1:
        _log.warning(
            "with chunks=1 nothing overlaps: the %d stages run one after another; set pipe.chunks, starting with four "
            "per stage",
            stages,
        )
    else:
        _log.warning(
            "a mini-batch of one row is one micro-batch, so nothing overlaps: the %d stages run one after another; "
            "pass at least chunks=%d rows; GPipe(..., in_spec=gpipe.Packed()) splits a row of several documents",
            stages,
            chunks,
        )


def warn_of_mixing(model: nn.Module) -> None:
    """Warn about layers that compute a row from all rows of a micro-batch."""
    found = [*mixing_layers(model)]
    if found:
        name, why = found[0]
        more = f", as do {len(found) - 1} more" if len(found) > 1 else ""
        _log.warning(
            "layer %r computes each row from all rows of a micro-batch: %s%s; micro-batches give other results than "
            "the full mini-batch, as without a pipeline; gpipe.check(pipe, input) shows by how much",
            name,
            why,
            more,
        )


def build_losses(
    call: Call, rule: Rule, batches: Sequence[Batch], chunks: Chunks, device: torch.device, error: Unlike
) -> MicrobatchLosses:
    """Return the object that computes one loss per micro-batch on ``device``; ``error`` makes its errors."""
    arguments = _arguments(call.loss_fn, call.target, batches, chunks, device)
    if rule.more is not None:
        arguments = [(*own, *_move(more, device)) for own, more in zip(arguments, rule.more, strict=True)]
    rows = [batch.rows for batch in batches]
    keeps = call.return_outputs
    weights = None if rule.weights is None else _move(rule.weights, device)
    return MicrobatchLosses(rule.loss_fn, arguments, weights, rows, unlike=error, keep_outputs=keeps)


def _move(values: Sequence[Any], device: torch.device) -> list[Any]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def build_whole_loss(
    call: Call, batches: Sequence[Batch], out_spec: Any, device: torch.device, error: Unlike
) -> WholeLoss:
    """Return the object that computes the loss once on ``device``, from the joined outputs of ``batches``."""
    loss_fn = own_loss if call.loss_fn is None else call.loss_fn
    arguments = whole_arguments(call, device)
    join = partial(gather_activation, batches=batches, spec=out_spec)
    unlike = None if call.reduction is None else error
    weight, keeps = 1.0 / call.divisor, call.return_outputs
    return WholeLoss(loss_fn, arguments, join, weight=weight, unlike=unlike, keep_outputs=keeps)


def whole_arguments(call: Call, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of ``loss_fn`` after the output of the full mini-batch: the target, None or nothing."""
    alone = takes_output_alone(call.loss_fn, call.target)
    if call.target is None:
        return () if alone else (None,)
    target, _ = unwrap(call.target, None, "target")
    # Detached, because its gradient could not reach the caller's graph.
    return (map_tensors(lambda tensor: tensor.detach().to(device), target),)


def build_result(
    losses: Losses, batches: Sequence[Batch], out_spec: Any, with_outputs: bool, *, has_outputs: bool
) -> Any:
    """Return the loss, then metrics, if any, and outputs, if requested; None for outputs of another process."""
    found: list[Any] = [losses.loss]
    if losses.metrics is not None:
        found.append(losses.metrics)
    if with_outputs:
        found.append(_outputs(losses, batches, out_spec) if has_outputs else None)
    return found[0] if len(found) == 1 else tuple(found)


def _outputs(losses: Losses, batches: Sequence[Batch], out_spec: Any) -> Any:
    try:
        return gather_outputs([losses.outputs[i] for i in range(len(batches))], batches, out_spec)
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
    """Return whether ``loss_fn`` is called with the output alone, because it needs no target and there is none.

    Raises:
        TypeError: ``loss_fn`` is not callable, or does not accept the ``target``.
    """
    if loss_fn is None and target is not None:
        raise TypeError("got a target but no loss_fn; pass loss_fn=..., or omit the target")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the output and the target; got {loss_fn!r}")
    if loss_fn is None or target is None:
        return loss_fn is None or _takes(loss_fn, 1)
    if not _takes(loss_fn, 2) and _takes(loss_fn, 1):
        raise TypeError("got a target, but loss_fn accepts only the output; make it accept both, or omit the target")
    return False


def _takes(loss_fn: LossFunction, count: int) -> bool:
    """Return whether the signature of ``loss_fn`` accepts ``count`` arguments; True if it has no signature."""
    function: Any = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    code = getattr(function, "__code__", None)
    if code is not None and not code.co_flags & inspect.CO_VARARGS:  # inspect.signature takes as long as two cells
        most: int = code.co_argcount - inspect.ismethod(function)
        return most - len(function.__defaults__ or ()) <= count <= most
    try:
        return binds(inspect.signature(function), *[None] * count)
    except (TypeError, ValueError):  # not every builtin function has a signature
        return True


def _targets(target: Any, device: torch.device, inputs: Sequence[Batch], chunks: Chunks) -> list[Any]:
    value = check_batch(target, None, "target")
    # Detached, because its gradient could not reach the caller's graph.
    detached = value._replace(bare=map_tensors(Tensor.detach, value.bare))
    if value.spec is not None and not any(isinstance(rule, Split) for rule in rules(*value)):
        return [map_tensors(lambda tensor: tensor.to(device), detached.bare)] * len(inputs)
    targets, _ = split_batch(detached, device, *chunks)
    expect_same_rows(targets, inputs)
    return [batch.value for batch in targets]

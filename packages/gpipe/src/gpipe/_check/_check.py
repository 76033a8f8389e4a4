"""Check whether a model trains as a pipeline as it does without."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Arguments, map_tensors, scatter, unwrap

from .._flatten import flatten
from .._flatten._inputs import Inputs
from .._flatten._shapes import expect_data
from .._gpipe import GPipe
from ..balance import uniform
from ..module._arguments import checked_chunks
from ..module._partition import checked_balance
from ..module._whole import replicated
from ._findings import Finding
from ._loss import Loss, uneven
from ._model import Walked, tied, walk
from ._pipe import Case, compare
from ._report import Report
from ._trial import Signal, call_all, seeded

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def check(
    model: nn.Module,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    balance: Iterable[int] | None = None,
    chunks: int = 4,
) -> Report:
    """Check whether ``model`` trains in micro-batches and stages as it does without, and find what differs.

    First, each layer is run alone, in double precision, on the input that it gets in the plain model, once as a whole
    and once in micro-batches. So a fault shows in its own layer and in no other. Outputs, gradients and buffers are
    compared; where they differ, the cause is looked for. Then pipes of the whole model, under each schedule and
    checkpoint mode, are compared with the plain loop over micro-batches.

    Args:
        model: an ``nn.Sequential``, or any model that :func:`gpipe.flatten` takes. It is copied, not changed.
        sample: an input of the model with at least two rows; :class:`microbatch.Arguments` for several
            arguments. A model that is not an ``nn.Sequential`` takes a mapping as named arguments.
        target: what ``loss_fn`` compares with, cut like ``sample``.
        loss_fn: as for :meth:`gpipe.GPipe.step`; by default the loss that the model computes, if it
            returns one, else the mean square of its outputs.
        balance: layers of each stage; by default four even stages, or one for each layer if there are fewer layers.
        chunks: how many micro-batches.

    Returns:
        A report with ``report.ok`` and ``report.findings``; ``print(report)`` explains them.

    Raises:
        TypeError: ``model`` is not a module, or ``target`` is given without a ``loss_fn`` that takes it.
        ValueError: ``sample`` has less than two rows, ``chunks`` is less than two, or ``balance`` does not fit.
        Exception: any error that the plain model raises on ``sample``.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=0), nn.Linear(4, 2))
    >>> report = check(model, torch.randn(8, 4))
    >>> [(finding.code, finding.layer) for finding in report.findings]
    [('mixes-rows', '1')]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    expect_data(model, "check")
    loss = Loss(loss_fn, target)
    if checked_chunks(chunks) < 2:
        raise ValueError(f"chunks must be at least 2, or there is nothing to compare; got {chunks}")
    with seeded(model):
        layers, inputs, dtype = _in_double(model, sample)
        target = _double(target)
        sizes = _sizes(balance, layers)
        return _check(layers, inputs, target, loss, sizes, chunks, dtype)


def _check(
    layers: nn.Sequential,
    inputs: Any,
    target: Any,
    loss: Loss,
    balance: Sequence[int],
    chunks: int,
    dtype: torch.dtype,
) -> Report:
    batches = scatter(replicated(inputs, "sample"), chunks)
    if len(batches) < 2:
        raise ValueError("sample has a single row; a check compares micro-batches, so give it two or more")
    targets = [None] * len(batches) if target is None else [each.value for each in scatter(target, chunks)]
    rows = [batch.rows[0] for batch in batches]
    tolerance = _TOLERANCE.get(dtype, 5e-2)
    walked = walk(layers, Signal(unwrap(inputs)[0], {}), [Signal(batch.value, {}) for batch in batches], tolerance)
    findings = [*walked.findings, *tied(layers)]
    agreed: list[str] = []
    if not _broken(findings):
        findings += _of_loss(loss, walked, target, targets, rows, tolerance)
    if not _broken(finding for finding in findings if finding.code != "loss"):
        draws = any(finding.code == "random" for finding in findings)
        case = Case(layers, balance, chunks, inputs, target, batches, targets, loss, draws)
        together, agreed = compare(case, tolerance * 100)
        findings += together
    names = len(list(layers.children()))
    return Report(tuple(findings), names, sum(rows), len(batches), str(dtype).removeprefix("torch."), tuple(agreed))


def _broken(findings: Iterable[Finding]) -> bool:
    """Whether there are errors of single layers, which a whole pipe would show again."""
    return any(finding.level == "error" for finding in findings)


def _of_loss(
    loss: Loss, walked: Walked, target: Any, targets: Sequence[Any], rows: Sequence[int], tolerance: float
) -> list[Finding]:
    parts = [(part.value, y, n) for part, y, n in zip(walked.parts, targets, rows, strict=True)]
    return list(uneven(loss, (walked.whole.value, target, sum(rows)), parts, tolerance))


def _in_double(model: nn.Module, sample: Any) -> tuple[nn.Sequential, Any, torch.dtype]:
    """Copies of the layers and their input in double precision; in their own precision if that fails."""
    own = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.get_default_dtype())
    try:
        return *_copied(copy.deepcopy(model).double(), _double(sample)), torch.float64
    except Exception:
        # The model cannot compute in double precision; or it fails in any precision, and then this raises.
        return *_copied(copy.deepcopy(model), sample), own


def _copied(model: nn.Module, sample: Any) -> tuple[nn.Sequential, Any]:
    """The layers of ``model``, which has to work on ``sample``, and what the first of them is called with."""
    if isinstance(model, GPipe):
        model = nn.Sequential(OrderedDict(model.named_children()))
    if isinstance(model, nn.Sequential):
        if not len(model):
            raise ValueError("model has no layers")
        layers, inputs = model, sample
    else:
        layers, inputs = flatten(model, sample), Arguments(*Inputs.of(sample))
    trial = copy.deepcopy(layers)
    with torch.no_grad():
        call_all(trial, unwrap(inputs)[0])
    return layers, inputs


def _double(value: Any) -> Any:
    """The same tree with all real floating-point tensors in double precision, without their graph."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor

    return map_tensors(double, value)


def _sizes(balance: Iterable[int] | None, layers: nn.Sequential) -> list[int]:
    count = len(list(layers.children()))
    return uniform(min(4, count), layers) if balance is None else checked_balance(balance, count)

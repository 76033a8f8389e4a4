"""Check whether a model trains as a pipeline as it does without."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Arguments, map_tensors, scatter, unwrap
from profiler.sandbox import copied

from .._gpipe import GPipe
from ..balance import uniform
from ..model._blocks import divide
from ..model._stepping import expect_own_forward
from ..module._arguments import checked_chunks
from ..module._cut import replicated
from ..module._data import expect_data
from ..module._inputs import Inputs
from ..module._partition import checked_balance
from ._findings import Finding
from ._forward import examine_forward, units_of, walk_forward
from ._layer import broken
from ._loss import EACH, ONCE, Loss, examine_loss
from ._model import Record, examine_all, finest, walk
from ._pipe import STAGES, examine_pipe
from ._report import Report
from ._rows import Cut, Dims
from ._trial import Signal, seeded

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@torch.enable_grad()
def check(
    model: nn.Module,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    reduction: str | None = None,
    balance: Iterable[int] | None = None,
    chunks: int = 4,
) -> Report:
    """Check whether ``model`` trains in micro-batches and stages as it does without, and find what differs.

    The plain model runs once, in double precision. Then each layer runs alone on the input that it got there, whole and
    in uneven micro-batches. Outputs, gradients and buffers are compared; layers that draw random numbers, in evaluation
    mode, and in training mode with other rows exchanged. At last a pipe of the whole model makes a step, with
    recomputations. All of it takes about five steps of the plain model in double precision.

    Of a model with a forward of its own, the layers are the modules that it calls, and what the forward computes
    between these. What follows its last block is not examined if the loss is computed once, on the output of all rows.

    Args:
        model: an ``nn.Sequential``, or a model with a forward of its own. It is copied, not changed. One in evaluation
            mode is checked in training mode.
        sample: an input of the model with at least two rows, which should differ; :class:`microbatch.Arguments` for
            several arguments. A model with a forward of its own takes a mapping as named arguments.
        target: what ``loss_fn`` compares with, cut like ``sample``.
        loss_fn: as for :meth:`gpipe.GPipe.step`; by default the loss that the model computes, if it returns one, else
            the mean square of its outputs.
        reduction: as for :meth:`gpipe.GPipe.step`; the check finds out whether it is true.
        balance: layers or blocks of each stage; by default four even stages, or fewer if there are fewer layers.
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
    if isinstance(model, GPipe):
        model = model[:]
    loss = Loss(loss_fn, target, reduction)
    if checked_chunks(chunks) < 2:
        raise ValueError(f"chunks must be at least 2, or there is nothing to compare; got {chunks}")
    if isinstance(model, nn.Sequential):
        if not len(model):
            raise ValueError("model has no layers")
    else:
        expect_own_forward(model)
        sample, loss.of_substitute = Arguments(*Inputs.of(sample)), None
    asked = balance if balance is None else [*balance]
    blocks = () if isinstance(model, nn.Sequential) else _blocks(model, asked)
    with seeded(model):
        record = _in_double(model, sample, target, loss, blocks)
        return _report(record, loss, chunks, asked)


def _in_double(model: nn.Module, sample: Any, target: Any, loss: Loss, blocks: Collection[str]) -> Record:
    """In the model's own precision if double fails."""
    own = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.get_default_dtype())
    try:
        loss.to(torch.float64)
        return _recorded(_trainable(model).double(), _double(sample), _double(target), torch.float64, loss, blocks)
    except Exception:
        # The model cannot compute in double precision; or it fails in any precision, and then this raises.
        loss.to(own)
        return _recorded(_trainable(model), sample, target, own, loss, blocks)


def _trainable(model: nn.Module) -> nn.Module:
    """A copy in training mode. Norms that a model in training mode holds in evaluation mode stay so."""
    model = copied(model)
    return model if model.training else model.train()


def _recorded(
    model: nn.Module, sample: Any, target: Any, dtype: torch.dtype, loss: Loss, blocks: Collection[str]
) -> Record:
    model.zero_grad()
    inputs = Signal(unwrap(sample)[0], {})
    if isinstance(model, nn.Sequential):
        steps = walk(model, inputs)
        record = Record(model, sample, target, dtype, steps, steps[-1].gave.output, [step.name for step in steps])
    else:
        units = units_of(model, blocks)
        steps, output, draws = walk_forward(model, units, inputs)
        record = Record(model, sample, target, dtype, steps, output, units, blocks, draws)
    loss.of(record.output.value, unwrap(target, root="target")[0])
    return record


def _report(record: Record, loss: Loss, chunks: int, balance: Sequence[int] | None) -> Report:
    batches = scatter(replicated(record.inputs, "sample"), chunks)
    real = Cut(tuple(batch.rows[0] for batch in batches))
    if sum(real.rows) < 2:
        raise ValueError(f"sample has {sum(real.rows)} rows; a check compares micro-batches, so give it two or more")
    dims = real.dims(record.given.tensors(), [Signal(batch.value, {}).tensors() for batch in batches])
    tolerance = _TOLERANCE.get(record.dtype, 5e-2)
    whole = record.output.value, unwrap(record.target)[0], sum(real.rows)
    own, is_once = loss.is_own(whole[0]), loss.rule(whole, real.rows) is None
    if isinstance(record.model, nn.Sequential):
        counted = f"{len(record.steps)} layers"
        balance = _sizes(balance, record.model)
        findings, where = examine_all(record.model, record.steps, dims, real, tolerance)
    else:
        counted = f"{len(record.blocks)} blocks"
        findings, where = examine_forward(record, dims, real, tolerance, ends=not is_once, is_own=own)
    agreed: list[str] = []
    kind = "" if own else f"the loss is computed {ONCE if is_once else EACH}"
    # What is wrong in a layer is wrong in the loss and in a pipe too, and would be reported three times.
    if not broken(findings):
        findings += _of_loss(record, loss, real, where, chunks, tolerance)
    if not broken(findings):
        draws = any(finding.code == "random" for finding in findings)
        together, agreed = examine_pipe(record, loss, balance, chunks, tolerance, draws)
        findings += together
    checked = f"{counted}, {sum(real.rows)} rows in {len(batches)} micro-batches"
    return Report(tuple(findings), f"{checked}, in {str(record.dtype).removeprefix('torch.')}", tuple(agreed), kind)


def _blocks(model: nn.Module, balance: Sequence[int] | None) -> list[str]:
    """The names of the blocks of a pipe of ``model``, which a ``balance`` has to fit."""
    if balance is None:
        return [*divide(model, STAGES).blocks]
    blocks = [*divide(model, 1).blocks]
    checked_balance(balance, len(blocks))
    return blocks


def _of_loss(record: Record, loss: Loss, real: Cut, dims: Dims, chunks: int, tolerance: float) -> list[Finding]:
    """The findings for the loss, of the output of the plain model in uneven parts."""
    target = Signal(unwrap(record.target)[0], {})
    whole = Signal((record.output.value, target.value), {})
    if record.target is not None:
        targets = scatter(replicated(record.target, "target"), chunks, root="target")
        dims = [*dims, *real.dims(target.tensors(), [Signal(each.value, {}).tensors() for each in targets])]
    cut = finest(whole, dims, real)
    parts = [(*part.value, rows) for part, rows in zip(cut.signals(whole, dims), cut.rows, strict=True)]
    return [*examine_loss(loss, (*whole.value, sum(real.rows)), parts, tolerance)]


def _double(value: Any) -> Any:
    """The same tree, detached, with all real floating-point tensors in double precision."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor

    return map_tensors(double, value)


def _sizes(balance: Sequence[int] | None, layers: nn.Sequential) -> list[int]:
    count = len(list(layers.children()))
    return uniform(min(STAGES, count), layers) if balance is None else checked_balance(balance, count)

""":func:`gpipe.check`: compare the layers, the loss and a full pipeline step with the plain model."""

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
from ..module._arguments import check_chunks
from ..module._data import expect_data
from ..module._inputs import Inputs
from ..module._partition import check_balance
from ..module._split_batch import replicate_constants
from ._findings import Finding
from ._forward import examine_forward, find_units, walk_forward
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
    """Check that ``model`` trains in a pipeline as it does without one, and report what differs.

    The plain model runs once, in double precision. Each layer then runs alone on the input it received there, once on
    the full mini-batch and once on uneven micro-batches, and its outputs, gradients and buffers are compared. Layers
    that use random numbers are compared in evaluation mode; in training mode, some rows of their input are exchanged
    and the remaining rows compared. Finally, a pipe of the model runs one step with recomputation. In total this takes
    about five steps of the plain model in double precision.

    The layers of a model with its own forward are the modules that it calls, and the operations between them. The
    operations after the last block are not checked if the loss is computed once, on the full mini-batch.

    Args:
        model: an ``nn.Sequential``, or a model with its own forward. It is copied and not changed. A model in
            evaluation mode is checked in training mode.
        sample: an input of the model with at least two rows, which should differ; :class:`microbatch.Arguments` for
            several arguments. For a model with its own forward, a mapping holds keyword arguments.
        target: the second argument of ``loss_fn``, split like ``sample``.
        loss_fn: as in :meth:`gpipe.GPipe.step`. Defaults to the loss that the model returns, if any; otherwise to the
            mean square of its outputs.
        reduction: as in :meth:`gpipe.GPipe.step`. The check verifies it.
        balance: the number of layers or blocks per stage. Defaults to four even stages, or one per layer if there are
            fewer than four layers.
        chunks: the number of micro-batches.

    Returns:
        A report with ``report.ok`` and ``report.findings``; ``print(report)`` explains them.

    Raises:
        TypeError: ``model`` is not a module, or ``target`` is given without a ``loss_fn`` that takes it.
        ValueError: ``sample`` has fewer than two rows, ``chunks`` is less than two, or ``balance`` does not fit.
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
    if check_chunks(chunks) < 2:
        raise ValueError(f"chunks must be at least 2, to have micro-batches to compare; got {chunks}")
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
    """Run the plain model in double precision, or in its own precision if that fails."""
    own = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.get_default_dtype())
    try:
        loss.to(torch.float64)
        return _record_model(_trainable(model).double(), _double(sample), _double(target), torch.float64, loss, blocks)
    except Exception:
        # If the model fails in any precision, and not just in double, the error is raised here.
        loss.to(own)
        return _record_model(_trainable(model), sample, target, own, loss, blocks)


def _trainable(model: nn.Module) -> nn.Module:
    """Return a copy in training mode. If ``model`` is in training mode, its frozen norms stay in evaluation mode."""
    model = copied(model)
    return model if model.training else model.train()


def _record_model(
    model: nn.Module, sample: Any, target: Any, dtype: torch.dtype, loss: Loss, blocks: Collection[str]
) -> Record:
    model.zero_grad()
    inputs = Signal(unwrap(sample)[0], {})
    if isinstance(model, nn.Sequential):
        steps = walk(model, inputs)
        record = Record(model, sample, target, dtype, steps, steps[-1].result.output, [step.name for step in steps])
    else:
        units = find_units(model, blocks)
        steps, output, draws = walk_forward(model, units, inputs)
        record = Record(model, sample, target, dtype, steps, output, units, blocks, draws)
    loss.of(record.output.value, unwrap(target, root="target")[0])
    return record


def _report(record: Record, loss: Loss, chunks: int, balance: Sequence[int] | None) -> Report:
    batches = scatter(replicate_constants(record.inputs, "sample"), chunks)
    real = Cut(tuple(batch.rows[0] for batch in batches))
    if sum(real.rows) < 2:
        raise ValueError(f"sample has {sum(real.rows)} rows; a check compares micro-batches and needs at least two")
    dims = real.dims(record.signal.tensors(), [Signal(batch.value, {}).tensors() for batch in batches])
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
    # An error in a layer also shows in the loss and in the pipe, and would be reported three times.
    if not broken(findings):
        findings += _of_loss(record, loss, real, where, chunks, tolerance)
    if not broken(findings):
        draws = any(finding.code == "random" for finding in findings)
        together, agreed = examine_pipe(record, loss, balance, chunks, tolerance, draws)
        findings += together
    checked = f"{counted}, {sum(real.rows)} rows in {len(batches)} micro-batches"
    return Report(tuple(findings), f"{checked}, in {str(record.dtype).removeprefix('torch.')}", tuple(agreed), kind)


def _blocks(model: nn.Module, balance: Sequence[int] | None) -> list[str]:
    """Return the block names of a pipe of ``model``, after checking that ``balance`` fits them."""
    if balance is None:
        return [*divide(model, STAGES).blocks]
    blocks = [*divide(model, 1).blocks]
    check_balance(balance, len(blocks))
    return blocks


def _of_loss(record: Record, loss: Loss, real: Cut, dims: Dims, chunks: int, tolerance: float) -> list[Finding]:
    """Return the findings for the loss, computed on uneven parts of the plain model's output."""
    target = Signal(unwrap(record.target)[0], {})
    whole = Signal((record.output.value, target.value), {})
    if record.target is not None:
        targets = scatter(replicate_constants(record.target, "target"), chunks, root="target")
        dims = [*dims, *real.dims(target.tensors(), [Signal(each.value, {}).tensors() for each in targets])]
    cut = finest(whole, dims, real)
    parts = [(*part.value, rows) for part, rows in zip(cut.signals(whole, dims), cut.rows, strict=True)]
    return [*examine_loss(loss, (*whole.value, sum(real.rows)), parts, tolerance)]


def _double(value: Any) -> Any:
    """Return the same tree with its real floating-point tensors detached and in double precision."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor

    return map_tensors(double, value)


def _sizes(balance: Sequence[int] | None, layers: nn.Sequential) -> list[int]:
    count = len(list(layers.children()))
    return uniform(min(STAGES, count), layers) if balance is None else check_balance(balance, count)

"""Find out why a layer computes something else on micro-batches than on the mini-batch."""

from __future__ import annotations

import copy
import math

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._findings import Finding
from ._rows import NoRowsError, difference, dimension
from ._runs import Runs, Task, dims_of, figure
from ._trial import attempt

_REASSOCIATION = 1e-3
"""Below this, a layer that computes in a lower precision than its input has just rounded differently."""


def explain(task: Task, layer: nn.Module, runs: Runs, apart: float) -> Finding:
    """Why micro-batches of ``layer`` give something else than the whole, by ``apart``."""
    mixed = _mixed(task, layer)
    differs = f"micro-batches differ from the whole by {figure(apart)} of the largest value"
    if mixed > task.tolerance:
        proof = f"changing row 0 of the input changes other rows of the output, by {figure(mixed)}; {differs}"
        if _normalises(layer) and _mixed(task, _without_norms(layer)) <= task.tolerance:
            return task.finding("batchnorm", "normalises each micro-batch by statistics of its own", differs)
        return task.finding("mixes-rows", "an output row depends on other rows of the input", proof)
    if apart < _REASSOCIATION:
        return task.finding("reassociation", "computes in less than double precision", differs)
    if None in runs.dims and _whole_differs(task, runs):
        return task.finding("rows-lost", "reduces over rows: each micro-batch gives a value of its own", differs)
    return task.finding("rows", "depends on how many rows there are, or on which of them a row is", differs)


def _whole_differs(task: Task, runs: Runs) -> bool:
    pairs = zip(runs.pairs(), runs.dims, strict=True)
    return any(dim is None and difference(*pair) > task.tolerance for pair, dim in pairs)


def _mixed(task: Task, layer: nn.Module) -> float:
    """How far other rows of the output change with row 0 of the input."""
    inputs = [part.tensors() for part in task.parts]
    dims = [dimension(tensor, parts) for tensor, *parts in zip(task.whole.tensors(), *inputs, strict=True)]
    changed = task.whole.replaced([_changed(t, dim) for t, dim in zip(task.whole.tensors(), dims, strict=True)])
    before, after = attempt(copy.deepcopy(layer), task.whole), attempt(copy.deepcopy(layer), changed)
    outputs = [trial.output.tensors() for trial in (before, after)]
    try:
        probe = copy.deepcopy(layer)
        to = dims_of(before, [attempt(probe, part) for part in task.parts])
    except NoRowsError:
        return 0.0
    others = [[_others(t, dim) for t, dim in zip(each, to, strict=True) if dim is not None] for each in outputs]
    return difference(*others) if len(outputs[0]) == len(outputs[1]) else math.inf


def _changed(tensor: Tensor, dim: int | None) -> Tensor:
    if dim is None or tensor.shape[dim] < 2:
        return tensor
    changed = tensor.detach().clone()
    first = changed.select(dim, 0)
    # Whole numbers may be indices, which have to stay in range: those of the last row are.
    first.copy_(first * 1.5 + 0.1 if tensor.is_floating_point() else changed.select(dim, -1))
    return changed.requires_grad_(tensor.requires_grad)


def _others(tensor: Tensor, dim: int) -> Tensor:
    return tensor.narrow(dim, 1, tensor.shape[dim] - 1)


def _normalises(layer: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) and module.training for module in layer.modules())


def _without_norms(layer: nn.Module) -> nn.Module:
    """A copy that normalises nothing over the batch."""
    whole = nn.ModuleList([copy.deepcopy(layer)])
    for parent in list(whole.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                setattr(parent, name, nn.Identity())
    return whole[0]

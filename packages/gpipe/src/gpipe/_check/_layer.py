"""Check one layer: whether it computes on micro-batches what it computes on the mini-batch, and if not, why."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ._findings import Finding
from ._rows import NoRowsError, cut, difference, dimension
from ._runs import Runs, Task, figure, run_both, without_masks
from ._trial import Signal, Trial, attempt
from ._why import explain


class Examined(NamedTuple):
    """The findings for a layer, and its outputs: for the mini-batch, and for each micro-batch."""

    findings: list[Finding]
    whole: Signal
    parts: list[Signal]


def examine(task: Task) -> Examined:
    """Run copies of the layer on the mini-batch and on micro-batches, and compare outputs, gradients and buffers."""
    whole = attempt(copy.deepcopy(task.layer), task.whole)
    findings = [*_remarks(task, whole), *_repeats(task, whole)]
    # What draws is compared in evaluation, in which most draw nothing. Batch norm stays as it was.
    layer = without_masks(task.layer) if whole.drew else task.layer
    try:
        runs = run_both(task, layer)
    except NoRowsError as error:
        findings.append(task.finding("rows-lost", "its output does not follow the rows of its input", str(error)))
        return Examined(findings, whole.output, _guessed(task, whole))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        findings.append(task.finding("hard-coded-batch", "fails on a micro-batch, and not on the whole", what))
        return Examined(findings, whole.output, _guessed(task, whole))
    if task.is_last and not all(tensor.dim() for tensor in runs.whole.output.tensors()):
        # It computes the loss, whose whole is compared with its parts as that of any loss function.
        return Examined(findings, runs.whole.output, [part.output for part in runs.parts])
    if not runs.whole.drew and not any(finding.level == "error" for finding in findings):
        findings += _compared(task, layer, runs)
    return Examined(findings, runs.whole.output, _forced(runs))


def _remarks(task: Task, whole: Trial) -> Iterator[Finding]:
    if whole.drew_elsewhere:
        yield task.finding("impure", "draws from Python's or NumPy's generator")
    if whole.drew:
        yield task.finding("random", "draws random numbers")
    if whole.in_place:
        yield task.finding("in-place", "changes its input in place")
    weights = list(task.layer.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        yield task.finding("frozen", "none of its parameters requires grad")


def _repeats(task: Task, whole: Trial) -> Iterator[Finding]:
    """Check that another copy in the same state gives the same output, and gives it again."""
    twin = copy.deepcopy(task.layer)
    apart = _apart(whole, attempt(twin, task.whole))
    if apart > task.tolerance:
        message = "gives something else each time, for the same input, state and seed"
        yield task.finding("impure", message, f"differs by {figure(apart)}")
        return
    apart = _apart(whole, attempt(twin, task.whole))
    if apart > task.tolerance:
        message = "a second call gives something else, for the same input and seed"
        yield task.finding("stateful", message, f"differs by {figure(apart)}")


def _apart(one: Trial, other: Trial) -> float:
    return difference(one.output.tensors(), other.output.tensors())


def _forced(runs: Runs) -> list[Signal]:
    """What the plain model gives to the next layer, for each micro-batch: structure of its own, values of the whole."""
    columns = [whole for whole, _ in runs.pairs()]
    rows = zip(*columns, strict=True) if columns else [()] * len(runs.parts)
    return [part.output.replaced(row) for part, row in zip(runs.parts, rows, strict=True)]


def _guessed(task: Task, whole: Trial) -> list[Signal]:
    """The same where the micro-batches of this layer say nothing: tensors with as many rows as its input are cut."""
    rows = [_rows(part) for part in task.parts]
    columns = [
        torch.split(tensor, rows) if tensor.dim() and tensor.shape[0] == sum(rows) else [tensor] * len(rows)
        for tensor in whole.output.tensors()
    ]
    return [whole.output.replaced(row) for row in zip(*columns, strict=True)] or [whole.output] * len(rows)


def _rows(signal: Signal) -> int:
    return max([tensor.shape[0] for tensor in signal.tensors() if tensor.dim()], default=0)


def _compared(task: Task, layer: nn.Module, runs: Runs) -> list[Finding]:
    apart = runs.difference()
    if apart > task.tolerance:
        return [explain(task, layer, runs, apart)]
    runs.backward()
    return _gradients_and_buffers(task, runs)


def _gradients_and_buffers(task: Task, runs: Runs) -> list[Finding]:
    """Outputs agree: do gradients, and what the layer remembers? Sums over rows, in another order, round more."""
    tolerance = 100 * task.tolerance
    compared = {"its parameters": _of_parameters(runs), "its input": _of_input(task, runs)}
    wrong = [f"of {what}: by {figure(apart)} of the largest" for what, apart in compared.items() if apart > tolerance]
    if wrong:
        return [task.finding("gradient", "gradients differ, though outputs agree", "\n".join(wrong))]
    changed = [name for name, apart in _of_buffers(runs) if apart > tolerance]
    if changed:
        message = "buffers end with other values than after the whole mini-batch"
        return [task.finding("buffers", message, ", ".join(changed))]
    return []


def _of_parameters(runs: Runs) -> float:
    whole, parts = ([parameter.grad for parameter in layer.parameters()] for layer in runs.copies)
    return difference(whole, parts)


def _of_input(task: Task, runs: Runs) -> float:
    apart = [0.0]
    for k, whole in enumerate(task.whole.tensors()):
        pieces = [part.tensors()[k] for part in task.parts]
        dim, gradient = dimension(whole, pieces), runs.whole.leaves[k].grad
        if gradient is not None and dim is not None:
            apart.append(difference(cut(gradient, dim, pieces), [part.leaves[k].grad for part in runs.parts]))
    return max(apart)


def _of_buffers(runs: Runs) -> Iterator[tuple[str, float]]:
    there = dict(runs.copies[1].named_buffers())
    for name, buffer in runs.copies[0].named_buffers():
        if buffer.is_floating_point():
            yield name, difference([buffer], [there.get(name)])

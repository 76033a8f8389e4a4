"""Examine one layer: whether it computes on micro-batches what it computes on the mini-batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._findings import Finding
from ._rows import ROUNDING, Cut, Dims, NoRowsError, difference, exchanged, figure, kept
from ._task import LayerTask, Runs, calm, normalises
from ._trial import LayerTrial, Signal, attempt, same


def examine(task: LayerTask) -> tuple[list[Finding], Dims, Sequence[Any]]:
    """Compare the layer with itself on micro-batches, and its second run on the mini-batch with the first.

    Returns:
        The findings; where the tensors of the output have their rows; and the outputs for the micro-batches, of which
        the next layer gets all but the tensors.
    """
    findings, runs = [*_remarks(task)], None
    failing = "impure", "fails when other copies of the model have run"
    try:
        again = attempt(task.again, task.given)
        failing = "hard-coded-batch", "fails on a micro-batch, and not on the whole"
        findings += _repeats(task, again)
        if not broken(findings):
            runs = _run(task, again)
            findings += _compared(task, runs)
    except NoRowsError as error:
        findings.append(task.finding("rows-lost", "its output does not follow the rows of its input", str(error)))
    except Exception as error:
        findings.append(task.failure(*failing, error))
    # The next layer gets micro-batches all the same: one fault must not hide another.
    if runs is None or runs.cut != task.cut or len(runs.dims) != len(task.gave.tensors()) or broken(findings):
        dims = task.cut.guessed(task.gave.tensors(), task.dims)
        return findings, dims, [task.gave.output.value] * len(task.parts)
    return findings, runs.dims, [part.output.value for part in runs.parts]


def broken(findings: Sequence[Finding]) -> bool:
    """Whether there are errors."""
    return any(finding.level == "error" for finding in findings)


def _remarks(task: LayerTask) -> Iterator[Finding]:
    if task.gave.used.drew:
        yield task.finding("random", "draws random numbers")
    norms = [name or type(module).__name__ for name, module in task.layer.named_modules() if normalises(module)]
    if norms:
        yield task.finding("batchnorm", "normalises each micro-batch by statistics of its own", ", ".join(norms))


def _repeats(task: LayerTask, again: LayerTrial) -> Iterator[Finding]:
    """Check that the layer gives the same again in another copy of the model."""
    apart = difference(task.gave.tensors(), again.tensors())
    # An impure layer may happen to repeat itself, as a clock does within its resolution.
    if task.gave.used.impure:
        yield task.finding("impure", task.gave.used.impure)
    elif apart > task.tolerance:
        message = "gives something else each time, for the same input, state and seed"
        yield task.finding("impure", message, f"differs by {figure(apart)}")


def _run(task: LayerTask, again: LayerTrial) -> Runs:
    """Run the layer on micro-batches, without masks and batch norm."""
    whole, copies = again, (task.again, task.apart)
    # Masks and statistics of micro-batches differ by design; without them the rest of the layer can be compared.
    if task.gave.used.drew or task.normalises():
        copies = task.calmed(), calm(task.apart, task.given, task.gave.used.drew)
        whole = attempt(copies[0], task.given)
    try:
        return _run_parts(copies, whole, task.parts, task.cut)
    except Exception:
        # A layer may need a multiple of some number of rows, which the micro-batches of the pipe have.
        return _run_parts((copies[0], task.calmed()), whole, task.real.signals(task.given, task.dims), task.real)


def _run_parts(copies: tuple[nn.Module, nn.Module], whole: LayerTrial, given: Sequence[Signal], cut: Cut) -> Runs:
    parts = [attempt(copies[1], part) for part in given]
    return Runs(copies, whole, parts, cut, given, cut.dims(whole.tensors(), [part.tensors() for part in parts]))


def _compared(task: LayerTask, runs: Runs) -> Iterator[Finding]:
    """What differs: outputs, random numbers in training, gradients or state. The first of these is reported."""
    if not runs.whole.used.drew:
        apart = max([difference(*pair) for pair in _outputs(task, runs)], default=0.0)
        # Equal micro-batches may hide groups of rows; exchanging rows finds them.
        by = _mixed(task, runs) if runs.cut != task.cut else 0.0
        if max(apart, by) > task.tolerance:
            yield from _cause(task, runs, apart)
            return
    if task.gave.used.drew and (found := [*_in_training(task, runs)]):
        yield from found
    elif not runs.whole.used.drew:
        yield from _gradients_and_state(task, runs)


def _outputs(task: LayerTask, runs: Runs) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Each tensor that the layer gives, as pieces of the whole and as micro-batches; without the loss."""
    for k, (tensor, dim) in enumerate(zip(runs.whole.tensors(), runs.dims, strict=True)):
        if not _is_loss(task, tensor):
            yield runs.cut.pieces(tensor, dim), [part.tensors()[k] for part in runs.parts]


def _is_loss(task: LayerTask, tensor: Tensor) -> bool:
    return task.is_last and not tensor.dim()


def _in_training(task: LayerTask, runs: Runs) -> Iterator[Finding]:
    """With masks, for one seed, a second call must give what a first one gives, and no row may depend on others."""
    try:
        first = attempt(copy.deepcopy(task.layer), runs.given[0])
        apart = difference(first.tensors(), attempt(task.again, runs.given[0]).tensors())
    except Exception as error:
        yield task.failure("stateful", "fails on a micro-batch in training, after another one", error)
        return
    if apart > task.tolerance:
        yield task.finding("stateful", "a second call gives something else", f"differs by {figure(apart)}")
    elif _mixed(task, runs, masks=True) > task.tolerance:
        yield from _cause(task, runs, 0.0, masks=True)


def _cause(task: LayerTask, runs: Runs, apart: float, *, masks: bool = False) -> Iterator[Finding]:
    """Why outputs of micro-batches differ from that of the mini-batch by ``apart``; in training if ``masks``."""
    differs = f"micro-batches differ from the whole by {figure(apart)} of the largest value"
    by = _mixed(task, runs, masks=masks)
    if not masks and difference(runs.whole.tensors(), attempt(runs.copies[0], task.given).tensors()) > task.tolerance:
        yield task.finding("stateful", "a second call gives something else, for the same input and seed", differs)
    elif by > task.tolerance:
        proof = f"changing some rows of the input changes other rows of the output, by {figure(by)}"
        yield task.finding("mixes-rows", "an output row depends on other rows of the input", proof)
    elif apart >= ROUNDING and None in runs.dims:
        yield task.finding("rows-lost", "reduces over rows: each micro-batch gives a value of its own", differs)
    elif apart >= ROUNDING:  # below, it computes in less than double precision, and sums in another order
        yield task.finding("rows", "depends on how many rows there are, or on which of them a row is", differs)


def _mixed(task: LayerTask, runs: Runs, *, masks: bool = False) -> float:
    """How far rows of the output change when other rows of the input do, for the same random numbers.

    Args:
        masks: whether the layer draws as in training.
    """
    before, dims = runs.whole, runs.dims
    if masks:
        before = attempt(task.calmed(masks=True), task.given) if task.normalises() else task.gave
    if len(dims) != len(before.tensors()):
        dims = task.cut.guessed(before.tensors(), task.dims)
    rows = sum(task.cut.rows)
    chosen = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < 0.5
    chosen[:2] = torch.tensor([True, False])
    found = [0.0]
    # Both halves, since rows may depend on earlier ones only.
    for half in (chosen, ~chosen):
        try:
            after = attempt(task.calmed(masks=masks), exchanged(task.given, task.dims, half))
        except Exception:  # a layer may refuse rows in another order, which says nothing about how it mixes them
            continue
        if same(before.used.states, after.used.states):  # else the same rows get other random numbers
            found.append(difference(kept(before.tensors(), dims, half), kept(after.tensors(), dims, half)))
    return max(found)


def _gradients_and_state(task: LayerTask, runs: Runs) -> Iterator[Finding]:
    """Outputs agree: do gradients, and what the layer remembers? Sums over rows, in another order, round more."""
    tolerance = max(100 * task.tolerance, ROUNDING)
    try:
        _backward(task, runs)
    except Exception as error:
        yield task.failure("gradient", "its backward fails on micro-batches", error)
        return
    compared = {"its parameters": _of_parameters(runs), "its input": _of_input(task, runs)}
    wrong = [f"of {what}: by {figure(apart)} of the largest" for what, apart in compared.items() if apart > tolerance]
    if wrong:
        yield task.finding("gradient", "gradients differ, though outputs agree", "\n".join(wrong))
    one, other = ({**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in runs.copies)
    changed = [name for name in one if difference([one[name]], [other.get(name)]) > 100 * task.tolerance]
    if changed:
        message = "buffers end with other values than after the whole mini-batch"
        yield task.finding("buffers", message, ", ".join(changed))


def _backward(task: LayerTask, runs: Runs) -> None:
    """The backward of the whole, and those of the micro-batches, from the same gradients."""
    for layer in runs.copies:
        layer.zero_grad()  # of other layers, with which it shares parameters
    gradients = [None if _is_loss(task, tensor) else _gradient(tensor, k) for k, tensor in enumerate(runs.whole.roots)]
    runs.whole.backward(gradients)
    shares = [_shares(runs, gradient, dim) for gradient, dim in zip(gradients, runs.dims, strict=True)]
    for k, part in enumerate(runs.parts):
        part.backward([share[k] for share in shares])


def _gradient(tensor: Tensor, k: int) -> Tensor:
    """A gradient with a value of its own for every element, so that none can make up for another."""
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    return values.to(tensor.device, tensor.dtype)


def _shares(runs: Runs, gradient: Tensor | None, dim: int | None) -> Sequence[Tensor | None]:
    """The gradients of micro-batches. What is the same for all of them has equal shares in that of the whole."""
    if gradient is None or dim is None:
        return [None if gradient is None else gradient / len(runs.parts)] * len(runs.parts)
    return runs.cut.pieces(gradient, dim)


def _of_parameters(runs: Runs) -> float:
    whole, parts = ([parameter.grad for parameter in layer.parameters()] for layer in runs.copies)
    return difference(whole, parts, alike=True)


def _of_input(task: LayerTask, runs: Runs) -> float:
    apart = [0.0]
    for k, (leaf, dim) in enumerate(zip(runs.whole.leaves, task.dims, strict=True)):
        if leaf.grad is not None and dim is not None:
            found = [part.leaves[k].grad for part in runs.parts]
            apart.append(difference(runs.cut.pieces(leaf.grad, dim), found, alike=True))
    return max(apart)

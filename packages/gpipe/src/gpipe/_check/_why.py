"""Find out why a layer computes something else on micro-batches than on the mini-batch."""

from __future__ import annotations

import torch

from ._findings import Finding
from ._rows import ROUNDING, difference, exchanged, figure, kept
from ._task import LayerTask, Runs
from ._trial import attempt, same


def cause(task: LayerTask, runs: Runs, apart: float, *, masks: bool = False) -> Finding:
    """Why outputs of micro-batches differ from that of the mini-batch by ``apart``; in training if ``masks``."""
    differs = f"micro-batches differ from the whole by {figure(apart)} of the largest value"
    if not masks and difference(runs.whole.tensors(), attempt(runs.copies[0], task.given).tensors()) > task.tolerance:
        return task.finding("stateful", "a second call gives something else, for the same input and seed", differs)
    by = mixed(task, runs, masks=masks)
    if by > task.tolerance:
        proof = f"changing some rows of the input changes other rows of the output, by {figure(by)}"
        return task.finding("mixes-rows", "an output row depends on other rows of the input", proof)
    if apart < ROUNDING:
        return task.finding("reassociation", "computes in less than double precision", differs)
    if None in runs.dims:
        return task.finding("rows-lost", "reduces over rows: each micro-batch gives a value of its own", differs)
    return task.finding("rows", "depends on how many rows there are, or on which of them a row is", differs)


def mixed(task: LayerTask, runs: Runs, *, masks: bool = False) -> float:
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
    for half in (chosen, ~chosen):
        try:
            after = attempt(task.calmed(masks=masks), exchanged(task.given, task.dims, half))
        except Exception:  # a layer may refuse rows in another order, which says nothing about how it mixes them
            continue
        if same(before.used.states, after.used.states):  # else the same rows get other random numbers
            found.append(difference(kept(before.tensors(), dims, half), kept(after.tensors(), dims, half)))
    return max(found)

"""Run the layers of a model one after the other, and examine each on what it got in the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.sandbox import copied

from .._flatten._skeleton import followers
from ..skip import Skippable
from ..skip.namespace import Key
from ._findings import Finding
from ._layer import LayerExam, calm
from ._rows import Cut, Dims, NoRowsError, uneven
from ._trial import LayerTrial, Signal, attempt


class LayerRun(NamedTuple):
    """A layer in the forward of the plain model: its name, its input, and what it did."""

    name: str
    given: Signal
    gave: LayerTrial


class Record(NamedTuple):
    """The plain model, and its forward."""

    layers: nn.Sequential
    inputs: Any
    target: Any
    dtype: torch.dtype
    steps: list[LayerRun]

    @property
    def output(self) -> Signal:
        return self.steps[-1].gave.output


def walk(layers: nn.Sequential, inputs: Signal) -> list[LayerRun]:
    signal, waiting, steps = inputs, dict[Key, Tensor | None](), []
    for name, layer in copied(layers).named_children():
        waiting.update(signal.skips)  # until a layer pops them, which need not be the next
        pops = [key for module in layer.modules() if isinstance(module, Skippable) for key in module.poppable()]
        given = Signal(signal.value, {key: waiting.pop(key) for key in pops if key in waiting})
        steps.append(LayerRun(name, given, attempt(layer, given)._replace(roots=(), leaves=())))
        signal = steps[-1].gave.output
    return steps


def examine_all(
    layers: nn.Sequential, steps: Sequence[LayerRun], dims: Dims, real: Cut, tolerance: float
) -> tuple[list[Finding], Dims]:
    """The findings for all layers, and where the last output has its rows; ``dims`` is that of the first input."""
    # Three copies of the model in all: state that layers share is then that of their own run.
    cut, findings = finest(steps[0].given, dims, real), list[Finding]()
    again, apart = copied(layers), copied(layers)
    values: Sequence[Any] = [steps[0].given.value] * len(cut.rows)
    # Tensors are known by identity: what a layer gives, another one gets, also as a skip.
    rows = dict(zip(map(id, steps[0].given.tensors()), dims, strict=True))
    for step, layer, one, other in zip(steps, layers.children(), again.children(), apart.children(), strict=True):
        where = [rows[id(tensor)] for tensor in step.given.tensors()]
        pieces = [signal.tensors() for signal in cut.signals(step.given, where)]
        parts = [Signal(v, step.given.skips).replaced(p) for v, p in zip(values, pieces, strict=True)]
        exam = LayerExam(*step, layer, one, other, where, cut, parts, real, tolerance, step is steps[-1])
        dims, values = exam.examine()
        findings += exam.findings
        rows.update(zip(map(id, step.gave.tensors()), dims, strict=True))
    return findings, dims


def finest(whole: Signal, dims: Dims, real: Cut) -> Cut:
    """Uneven micro-batches, if all tensors can be cut into them; else the real ones."""
    cut = uneven(real)
    try:
        cut.signals(whole, dims)
    except NoRowsError:
        return real
    return cut


def calmed(layers: nn.Sequential, steps: Sequence[LayerRun]) -> nn.Sequential:
    calmed_layers = copied(layers)
    for layer, step in zip(calmed_layers.children(), steps, strict=True):
        calm(layer, step.given, step.gave.used.drew)
    # A pipe of a flattened model follows the mode of that model.
    for twin in followers(calmed_layers):
        twin.lead()
    for twin in followers(calmed_layers):
        twin.follow()
    return calmed_layers

"""Record the forward of a plain model, and check each layer of an ``nn.Sequential`` on its recorded input."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import unwrap
from profiler.sandbox import copied
from streams import Context

from ..skip import Skippable
from ..skip.namespace import Key
from ._findings import Finding
from ._layer import LayerCheck, calm
from ._rows import Cut, Dims, NoRowsError, uneven
from ._trial import LayerTrial, Signal, attempt


class LayerRun(NamedTuple):
    """A call of a layer in the plain model's forward: the layer's name, input and run, and the context of the call."""

    name: str
    input: Signal
    result: LayerTrial
    context: Context


class Record(NamedTuple):
    """The plain model and a record of its forward.

    Attributes:
        units: the names of the layers, or of the modules that the model's own forward calls.
        blocks: the names of the units between which a pipe splits that forward.
        draws: whether that forward uses random numbers itself.
    """

    model: nn.Module
    inputs: Any
    target: Any
    dtype: torch.dtype
    steps: list[LayerRun]
    output: Signal
    units: Collection[str]
    blocks: Collection[str] = ()
    draws: bool = False

    @property
    def signal(self) -> Signal:
        return Signal(unwrap(self.inputs)[0], {})


def walk(layers: nn.Sequential, inputs: Signal) -> list[LayerRun]:
    signal, waiting, steps = inputs, dict[Key, Tensor | None](), []
    for name, layer in copied(layers).named_children():
        waiting.update(signal.skips)  # until a layer pops them, not necessarily the next one
        pops = [key for module in layer.modules() if isinstance(module, Skippable) for key in module.poppable()]
        received = Signal(signal.value, {key: waiting.pop(key) for key in pops if key in waiting})
        result = attempt(layer, received)._replace(roots=(), leaves=())
        steps.append(LayerRun(name, received, result, Context.capture()))
        signal = result.output
    return steps


def examine_all(
    layers: nn.Sequential, steps: Sequence[LayerRun], dims: Dims, real: Cut, tolerance: float
) -> tuple[list[Finding], Dims]:
    """Return the findings for all layers, and the row dimensions of the last output, given those of the first input."""
    # One copy of the model per kind of run, so that layers share state only within it.
    cut, findings = finest(steps[0].input, dims, real), list[Finding]()
    rerun, split = copied(layers), copied(layers)
    values: Sequence[Any] = [steps[0].input.value] * len(cut.rows)
    # Keyed by identity: an output of a layer is the input of a later one, or its skip.
    rows = dict(zip(map(id, steps[0].input.tensors()), dims, strict=True))
    for step, layer, one, other in zip(steps, layers.children(), rerun.children(), split.children(), strict=True):
        where = [rows[id(tensor)] for tensor in step.input.tensors()]
        pieces = [signal.tensors() for signal in cut.signals(step.input, where)]
        parts = [Signal(v, step.input.skips).replaced(p) for v, p in zip(values, pieces, strict=True)]
        exam = LayerCheck(*step[:3], layer, one, other, where, cut, parts, real, tolerance, step is steps[-1])
        dims, values = exam.examine()
        findings += exam.findings
        rows.update(zip(map(id, step.result.tensors()), dims, strict=True))
    return findings, dims


def finest(whole: Signal, dims: Dims, real: Cut) -> Cut:
    """Return uneven micro-batches if all tensors can be split into them, and otherwise the real ones."""
    cut = uneven(real)
    try:
        cut.signals(whole, dims)
    except NoRowsError:
        return real
    return cut


def copy_and_calm(record: Record) -> nn.Module:
    """Return a copy of the model without dropout masks, whose batch norms use running statistics."""
    model = copied(record.model)
    for step in record.steps:
        calm(model.get_submodule(step.name), step.input, step.result.used.drew)
    if record.draws:
        quieten(model, record.units)
    return model


def quieten(model: nn.Module, units: Collection[str]) -> None:
    """Put all of ``model`` but its units in evaluation mode, so that its own operations use no random numbers."""
    inside = {each for name in units for each in model.get_submodule(name).modules()}
    for module in model.modules():
        module.training &= module in inside

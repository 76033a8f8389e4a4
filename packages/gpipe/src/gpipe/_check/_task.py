"""What is known of a layer that is examined: its input and output in the plain model, and its runs since."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._findings import Finding
from ._rows import Cut, Dims
from ._trial import LayerTrial, Signal


class LayerTask(NamedTuple):
    """A layer, what it did in the plain model, and how it is examined.

    Attributes:
        layer: in its state before the forward; it is copied.
        again: the layer in a second copy of the model, which computes the mini-batch.
        apart: the layer in a third copy of the model, which computes micro-batches. All micro-batches pass one layer
            before the first passes the next, so a layer that reads what another one keeps finds the last micro-batch's.
        given: its input in the plain model.
        gave: what it did there.
        dims: where the tensors of ``given`` have their rows.
        cut: uneven micro-batches.
        parts: ``given`` for each of these.
        real: the micro-batches of the pipe.
        tolerance: relative differences up to this are rounding.
        is_last: whether nothing but the loss comes after the layer.
    """

    name: str
    layer: nn.Module
    again: nn.Module
    apart: nn.Module
    given: Signal
    gave: LayerTrial
    dims: Dims
    cut: Cut
    parts: Sequence[Signal]
    real: Cut
    tolerance: float
    is_last: bool

    def finding(self, code: str, message: str, evidence: str = "") -> Finding:
        return Finding(code, self.name, type(self.layer).__name__, message, evidence)

    def failure(self, code: str, message: str, error: Exception) -> Finding:
        return self.finding(code, message, f"{type(error).__name__}: {error}")

    def normalises(self) -> bool:
        """Whether the layer uses statistics of the batch, as batch norm does."""
        return any(map(normalises, self.layer.modules()))

    def calmed(self, *, masks: bool = False) -> nn.Module:
        """A copy of the layer without batch norm, and without masks unless ``masks`` says so."""
        return calm(copy.deepcopy(self.layer), self.given, self.gave.used.drew and not masks)


class Runs(NamedTuple):
    """Forwards of one copy of a layer on the mini-batch, and of another on micro-batches, one after the other.

    Attributes:
        cut: the micro-batches.
        given: their inputs.
        dims: where the tensors of the outputs have their rows.
    """

    copies: tuple[nn.Module, nn.Module]
    whole: LayerTrial
    parts: Sequence[LayerTrial]
    cut: Cut
    given: Sequence[Signal]
    dims: Dims


def normalises(module: nn.Module) -> bool:
    """Whether ``module`` uses statistics of the batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def calm(layer: nn.Module, given: Signal, drew: bool) -> nn.Module:
    """``layer``, changed: batch norm uses running statistics; all of it is in evaluation mode if it ``drew``."""
    like = next((tensor for tensor in given.tensors() if tensor.is_floating_point()), torch.zeros(()))
    for module in layer.modules():
        if isinstance(module, _BatchNorm) and normalises(module):
            if module.running_mean is None:
                module.running_mean = like.new_zeros(module.num_features)
                module.running_var = like.new_ones(module.num_features)
            module.training = False
        module.training &= not drew
    return layer

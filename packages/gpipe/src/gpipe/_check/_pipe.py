"""Compare a step of a pipe of the whole model with one of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from microbatch import unwrap

from .._gpipe import GPipe
from ..engine._settings import inline
from ..values._leaves import Activation, as_nonleaf, clone_leaves
from ._findings import Finding
from ._loss import Loss, LossPart
from ._model import Record
from ._rows import difference, figure
from ._trial import SEED, call_all, seeded

Results = dict[str, Tensor | None]
"""The loss and the gradients of a step, by name."""


class Judge(NamedTuple):
    """A plain step and steps of a pipe, of the same model and mini-batch.

    Attributes:
        model: the model, and what it is called with.
        calm: a copy of the layers without masks and batch norm, which differ by design.
        balance: layers of each stage.
        rows: of the mini-batch.
        tolerance: the largest relative difference that counts as rounding.
    """

    model: Record
    calm: nn.Sequential
    loss: Loss
    balance: Sequence[int]
    chunks: int
    rows: int
    tolerance: float

    def plain(self) -> tuple[Results, bool]:
        """Loss and gradients of a plain step, and whether it drew random numbers all the same."""
        layers = copy.deepcopy(self.calm)
        value = as_nonleaf(clone_leaves(Activation(unwrap(self.model.inputs)[0]))).value
        with seeded(layers) as used:
            loss = self.loss.of([LossPart(call_all(layers, value), unwrap(self.model.target)[0], self.rows)])
        torch.autograd.backward(loss)
        return _results(layers, loss.detach()), used.drew

    def piped(self, layers: nn.Sequential, checkpoint: str) -> Results:
        """Loss and gradients of a step of a pipe of ``layers``, which are copied."""
        devices = ["cpu"] * len(self.balance)
        layers = copy.deepcopy(layers)
        pipe = GPipe(layers, self.balance, devices=devices, chunks=self.chunks, checkpoint=checkpoint)
        loss_fn = None if self.loss.is_own(self.model.output.value) else self.loss
        torch.manual_seed(SEED)
        with closing(pipe), inline():  # a layer with a state of its own must not depend on threads here
            found = pipe.step(self.model.inputs, self.model.target, loss_fn=loss_fn)
        # Names of the layers, since those of a pipe are of the model that was flattened. There may be metrics.
        return _results(layers, found[0] if isinstance(found, tuple) else found)

    def problem(self, expected: Results, run: Callable[[], Results]) -> str:
        """How what ``run`` gives differs from what is ``expected``, or why it fails; empty if it agrees."""
        try:
            found = run()
        except Exception as error:
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        apart = difference(list(expected.values()), [found[name] for name in expected], alike=True)
        return f"loss or gradients differ by {figure(apart)} of the largest" if apart > self.tolerance else ""

    def verdict(self, draws: bool) -> tuple[list[Finding], list[str]]:
        """What was found, and the settings under which a pipe of the whole model agreed with the plain model.

        Args:
            draws: whether a layer or the loss draws random numbers.
        """
        expected, drew = self.plain()
        agreed = []
        if not drew:
            if problem := self.problem(expected, partial(self.piped, self.calm, "always")):
                differs = self.problem(expected, partial(self.piped, self.calm, "never"))
                own = self.loss.is_own(self.model.output.value)
                return [_finding("loss" if own and differs else "pipeline" if differs else "recompute", problem)], []
            agreed.append("1f1b with 'always'")
        if draws:  # With all masks, as in training, checkpointing must change nothing.
            layers = self.model.layers
            if problem := self.problem(self.piped(layers, "never"), partial(self.piped, layers, "always")):
                return [_finding("recompute", problem)], []
            agreed.append("1f1b with 'always' as with 'never'")
        return [], agreed


def _finding(code: str, problem: str) -> Finding:
    messages = {
        "loss": "a pipe does not compute the model's own loss as the model does",
        "pipeline": "a pipe of the layers differs from the model",
        "recompute": "checkpointing changes the gradients",
    }
    return Finding(code, None, "", messages[code], problem)


def _results(model: nn.Module, loss: Tensor) -> Results:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: value if value is None else value.cpu() for name, value in {"loss": loss, **gradients}.items()}

"""Compare a step of a pipe of the whole model with one of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import unwrap

from .._gpipe import GPipe
from ..engine._settings import inline
from ..values._leaves import Activation, as_nonleaf, clone_leaves
from ._findings import Finding
from ._loss import Loss, Part
from ._rows import difference, figure
from ._trial import SEED, call_all, seeded

Results = dict[str, Tensor | None]
"""The loss and the gradients of a step, by name."""


class Case(NamedTuple):
    """A model and a mini-batch to train with.

    Attributes:
        layers: the model; it is copied.
        calm: a copy without masks and batch norm, which differ by design.
        balance: layers of each stage.
        inputs: as they were given, perhaps with rules for their parts.
        own: whether the model computes its loss.
        draws: whether a layer or the loss draws random numbers.
        tolerance: the largest relative difference that counts as rounding.
    """

    layers: nn.Sequential
    calm: nn.Sequential
    balance: Sequence[int]
    chunks: int
    inputs: Any
    target: Any
    rows: int
    loss: Loss
    own: bool
    draws: bool
    tolerance: float

    def plain(self) -> tuple[Results, bool]:
        """Loss and gradients of a plain step, and whether it drew random numbers all the same."""
        layers = copy.deepcopy(self.calm)
        value = as_nonleaf(clone_leaves(Activation(unwrap(self.inputs)[0]))).value
        with seeded(layers) as used:
            loss = self.loss.of([Part(call_all(layers, value), unwrap(self.target)[0], self.rows)])
        torch.autograd.backward(loss)
        return _results(layers, loss.detach()), used.drew

    def piped(self, layers: nn.Sequential, checkpoint: str) -> Results:
        """Loss and gradients of a step of a pipe of ``layers``, which are copied."""
        devices = ["cpu"] * len(self.balance)
        pipe = GPipe(copy.deepcopy(layers), self.balance, devices=devices, chunks=self.chunks, checkpoint=checkpoint)
        torch.manual_seed(SEED)
        with closing(pipe), inline():
            found = pipe.step(self.inputs, self.target, loss_fn=None if self.own else self.loss)
        return _results(pipe, found[0] if isinstance(found, tuple) else found)  # there may be metrics

    def problem(self, expected: Results, run: Callable[[], Results]) -> str:
        """How what ``run`` gives differs from what is ``expected``, or why it fails; empty if it agrees."""
        try:
            found = run()
        except Exception as error:
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        apart = difference(list(expected.values()), [found[name] for name in expected], alike=True)
        return f"loss or gradients differ by {figure(apart)} of the largest" if apart > self.tolerance else ""


def _results(model: nn.Module, loss: Tensor) -> Results:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: value if value is None else value.cpu() for name, value in {"loss": loss, **gradients}.items()}


def judge(case: Case) -> tuple[list[Finding], list[str]]:
    """What was found, and the settings under which a pipe of the whole model agreed with the plain model."""
    expected, drew = case.plain()
    agreed = []
    if not drew:
        if problem := case.problem(expected, partial(case.piped, case.calm, "always")):
            repeats = case.problem(expected, partial(case.piped, case.calm, "never"))
            code = "loss" if case.own and repeats else "pipeline" if repeats else "recompute"
            return [Finding(code, None, "", _MESSAGES[code], problem)], []
        agreed.append("1f1b with 'always'")
    if case.draws:  # With all masks, as in training, checkpointing must change nothing.
        if problem := case.problem(case.piped(case.layers, "never"), partial(case.piped, case.layers, "always")):
            return [Finding("recompute", None, "", _MESSAGES["recompute"], problem)], []
        agreed.append("1f1b with 'always' as with 'never'")
    return [], agreed


_MESSAGES = {
    "loss": "a pipe does not compute the model's own loss as the model does",
    "pipeline": "a pipe of the layers differs from the model",
    "recompute": "checkpointing changes the gradients",
}

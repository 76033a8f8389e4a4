"""Compare one training step of a pipe with one of the plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor, nn

from microbatch import unwrap
from profiler.sandbox import copied

from .._gpipe import GPipe
from ..engine._settings import inline
from ..module._step import without_advice
from ..values._leaves import Activation, as_nonleaf, clone_leaves
from ._findings import Finding
from ._loss import Loss, mean_square
from ._model import Record, copy_and_calm
from ._rows import ROUNDING, difference, figure
from ._trial import SEED, call_all, seeded

Results = dict[str, Tensor | None]
"""The loss and the gradients of a step, keyed by name."""

STAGES = 4
"""The default number of stages."""

_MESSAGES = {
    "loss": "the model's own loss differs in a pipe",
    "pipeline": "a pipe of the layers differs from the model",
    "recompute": "checkpointing changes the gradients",
}


def examine_pipe(
    model: Record, loss: Loss, balance: Sequence[int] | None, chunks: int, tolerance: float, draws: bool
) -> tuple[list[Finding], list[str]]:
    """Return the findings, and the comparisons in which a pipe of the model agreed.

    Args:
        balance: the number of layers or blocks per stage; None lets the pipe choose.
        tolerance: the largest relative difference that counts as rounding.
        draws: whether a layer or the loss uses random numbers.
    """
    calm = copy_and_calm(model)  # masks and batch norm differ by design
    own = loss.is_own(model.output.value)
    step = partial(_run_pipe, model, loss, balance, chunks)
    agreed, compare = list[str](), partial(_problem, max(ROUNDING, 100 * tolerance))
    expected, drew = _plain(model, calm, loss)
    if not drew:
        if problem := compare(expected, partial(step, calm, "always")):
            # If it differs even without recomputation, recomputation is not the cause.
            differs = compare(expected, partial(step, calm, "never"))
            code = "loss" if own and differs else "pipeline" if differs else "recompute"
            return [Finding(code, None, "", _MESSAGES[code], problem)], []
        agreed.append("a step with 'always'")
    if draws:  # with masks, as in training, checkpointing must change nothing
        try:
            expected = step(model.model, "never")
        except Exception as error:
            return [Finding("pipeline", None, "", _MESSAGES["pipeline"], _format_error(error))], []
        if problem := compare(expected, partial(step, model.model, "always")):
            return [Finding("recompute", None, "", _MESSAGES["recompute"], problem)], []
        agreed.append("a step with 'always' as with 'never'")
    return [], agreed


def _plain(model: Record, layers: nn.Module, loss: Loss) -> tuple[Results, bool]:
    layers = copied(layers)
    value = as_nonleaf(clone_leaves(Activation(unwrap(model.inputs)[0]))).value
    with seeded(layers) as used:
        found = loss.of(call_all(layers, value), unwrap(model.target)[0])
    torch.autograd.backward(found)
    return _results(layers, found.detach()), used.drew


def _run_pipe(
    model: Record, loss: Loss, balance: Sequence[int] | None, chunks: int, layers: nn.Module, checkpoint: str
) -> Results:
    """Return the loss and the gradients of one step of a pipe of a copy of ``layers``."""
    layers = copied(layers)
    devices = ["cpu"] * (STAGES if balance is None else len(balance))
    pipe = GPipe(layers, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
    without_advice(pipe)  # the report contains it
    torch.manual_seed(SEED)
    with closing(pipe), inline():  # a stateful layer must not depend on threads here
        if loss.loss_fn is None and not loss.is_own(model.output.value):
            found = pipe.step(model.inputs, loss_fn=mean_square, reduction=loss.of_substitute)
        else:
            found = pipe.step(model.inputs, model.target, loss_fn=loss.loss_fn, reduction=loss.reduction)
    # A step with metrics returns a tuple.
    return _results(layers, found[0] if isinstance(found, tuple) else found)


def _problem(tolerance: float, expected: Results, run: Callable[[], Results]) -> str:
    """Return how the results of ``run`` differ from the ``expected`` ones, or its error; empty if they agree."""
    try:
        found = run()
    except Exception as error:
        return _format_error(error)
    deviation = difference(list(expected.values()), [found[name] for name in expected], alike=True)
    return f"loss or gradients differ by {figure(deviation)} of the largest" if deviation > tolerance else ""


def _format_error(error: Exception) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _results(model: nn.Module, loss: Tensor) -> Results:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: value if value is None else value.cpu() for name, value in {"loss": loss, **gradients}.items()}

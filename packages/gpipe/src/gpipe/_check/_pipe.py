"""Compare pipes of the whole model, under each schedule and checkpoint mode, with a loop over micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Batch

from .._gpipe import GPipe
from ..engine._settings import inline
from ..schedule import Schedule, zero_bubble
from ..values._leaves import Activation, as_nonleaf, clone_leaves
from ._findings import Finding
from ._loss import Loss
from ._rows import difference
from ._runs import figure, without_masks
from ._trial import SEED, Generators, call_all

Results = dict[str, Tensor | None]
"""The loss and the gradients of a step, by name."""


class Way(NamedTuple):
    """One way to run a pipe."""

    schedule: str
    checkpoint: str
    threads: bool = True

    def __str__(self) -> str:
        return f"{self.schedule} with {self.checkpoint!r}{'' if self.threads else ' inline'}"


KEEPING, RECOMPUTING = Way("1f1b", "never"), Way("1f1b", "always")
WAYS = (
    Way("1f1b", "never", threads=False),
    RECOMPUTING,
    Way("fill_drain", "except_last"),
    Way("zero_bubble", "never"),
    Way("interleaved", "never"),
)
"""Each schedule and each checkpoint mode, with threads and without."""


class Case(NamedTuple):
    """A model and a mini-batch to train with.

    Attributes:
        layers: the plain model; it is copied.
        balance: layers of each stage.
        batches: ``inputs`` cut into ``chunks`` micro-batches.
        targets: those of ``target``.
        draws: whether a layer draws random numbers.
    """

    layers: nn.Sequential
    balance: Sequence[int]
    chunks: int
    inputs: Any
    target: Any
    batches: Sequence[Batch]
    targets: Sequence[Any]
    loss: Loss
    draws: bool

    def ways(self) -> list[Way]:
        """Interleaving needs as many stages for each of two workers."""
        stages = len(self.balance)
        return [way for way in WAYS if way.schedule != "interleaved" or (stages > 2 and stages % 2 == 0)]

    def step(self, layers: nn.Module, way: Way) -> Results:
        """Loss and gradients of one step of a pipe of ``layers``, which are copied."""
        devices = [f"cpu:{j % 2}" if way.schedule == "interleaved" else "cpu" for j in range(len(self.balance))]
        schedule: Schedule | str = way.schedule
        if schedule == "zero_bubble":  # under its name, only stages are split where that pays
            schedule = zero_bubble(len(self.batches), len(self.balance))
        copied = copy.deepcopy(layers)
        pipe = GPipe(copied, self.balance, devices=devices, chunks=self.chunks, checkpoint=way.checkpoint)
        torch.manual_seed(SEED)
        with closing(pipe), nullcontext() if way.threads else inline():
            found = pipe.step(self.inputs, self.target, loss_fn=self.loss, schedule=schedule)
        return _results(pipe, found[0] if isinstance(found, tuple) else found)  # there may be metrics

    def loop(self, layers: nn.Sequential) -> Results:
        """Loss and gradients of a plain loop over micro-batches."""
        plain = copy.deepcopy(layers)
        losses = []
        for batch, target in zip(self.batches, self.targets, strict=True):
            value = as_nonleaf(clone_leaves(Activation(batch.value))).value
            losses.append(self.loss.parts(call_all(plain, value), target, batch.rows[0]))
        loss = sum(total for total, _ in losses) / sum(count for _, count in losses)
        torch.autograd.backward(loss)
        return _results(plain, loss.detach())


def _results(model: nn.Module, loss: Tensor) -> Results:
    return {"loss": loss, **{name: parameter.grad for name, parameter in model.named_parameters()}}


def compare(case: Case, tolerance: float) -> tuple[list[Finding], list[str]]:
    """What was found, and the names of the ways to run a pipe that agree with the loop."""
    quiet = without_masks(case.layers)
    before = Generators(torch.device("cpu"))
    expected = case.loop(quiet)
    if before.drew():  # in evaluation too: other numbers than a pipe, but all pipes draw the same
        expected = case.step(quiet, case.ways()[0])
    problems: dict[str, list[str]] = {}
    for way in case.ways():
        problems.setdefault(_problem(expected, partial(case.step, quiet, way), tolerance), []).append(str(way))
    agreed = problems.pop("", [])
    findings = [
        Finding("pipeline", None, "", f"the pipe differs from the micro-batch loop under {', '.join(ways)}", problem)
        for problem, ways in problems.items()
    ]
    return [*findings, *([] if findings else _recomputed(case, tolerance))], agreed


def _recomputed(case: Case, tolerance: float) -> Iterator[Finding]:
    """With all masks, as in training, checkpointing must change nothing."""
    if not case.draws:  # then there are no masks, and it has been compared
        return
    kept = case.step(case.layers, KEEPING)
    problem = _problem(kept, partial(case.step, case.layers, RECOMPUTING), tolerance)
    if problem:
        yield Finding("recompute", None, "", "checkpointing changes the gradients", problem)


def _problem(expected: Results, run: Callable[[], Results], tolerance: float) -> str:
    """How what ``run`` gives differs from what is ``expected``, or why it fails; empty if it agrees."""
    try:
        found = run()
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    # All by one scale: a gradient that is nothing but rounding, as of a bias before batch norm, has none of its own.
    apart = difference(list(expected.values()), [found[name] for name in expected])
    return "" if apart <= tolerance else f"loss or gradients differ by {figure(apart)} of the largest"

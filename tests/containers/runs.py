"""Train a case plainly and in a pipe, and keep all that can be seen of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from packages.gpipe.tests.schedules import some_schedule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe import GPipe, inline
from gpipe.schedule import Schedule
from microbatch import Batch, gather

from .cases import Built, Case
from .kinds import hooked
from .losses import whole

Seen = dict[str, Any]
"""What a run leaves behind, by name."""


class UntrainableError(Exception):
    """A loss does not require grad."""


def plainly(case: Case, steps: bool) -> list[Seen]:
    """What a plain loop over the micro-batches does, or the whole mini-batch where that is the same."""
    built = case.build()
    return _each_run(case, built, _Plain(case, built, steps))


def piped(case: Case, steps: bool) -> list[Seen]:
    built = case.build()
    balance = case.balance(len(built.model))
    placement = case.placement(len(balance))
    devices = ["cpu"] * len(balance) if case.workers is None else [f"cpu:{worker}" for worker in placement]
    pipe = GPipe(built.model, balance, devices=devices, chunks=case.chunks, checkpoint=case.checkpoint)
    with contextlib.closing(pipe), inline() if case.inline else contextlib.nullcontext():
        return _each_run(case, built, _Piped(case, built, steps, pipe, placement))


class _Way:
    """How to get from rows to a loss and its gradients."""

    def __init__(self, case: Case, built: Built, steps: bool) -> None:
        self.case = case
        self.built = built
        self.steps = steps

    def loss(self, output: Any, target: Tensor) -> Any:
        return self.case.kind.compute(self._decaying(), self.built.head, output, target)

    def _decaying(self) -> list[nn.Parameter]:
        """The parameters that a loss may use itself.

        Outside of the pipe that makes two gradients of one parameter, each of which its hooks see for itself. What
        other micro-batches change meanwhile no loss can use.
        """
        changing = {id(m.weight) for m in self.built.model.modules() if isinstance(m, nn.Embedding) and m.max_norm}
        usable = [p for p in self.built.model.parameters() if id(p) not in changing]
        return [p for p in usable if self.steps or not hooked(p)]


class _Plain(_Way):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Any, Tensor]:
        pieces = x.shape[:1] if self.case.by_row else [len(part) for part in x.chunk(self.case.chunks)]
        outputs = [self.built.model(self.built.enter(part * 1)) for part in x.split(list(pieces))]
        if not self.steps:
            output = gather([Batch(each) for each in outputs])
            return output, whole(self.case.kind, [self.loss(output, target)], [len(x)])
        found = [self.loss(each, part) for each, part in zip(outputs, target.split(list(pieces)), strict=True)]
        if not all((each[0] if isinstance(each, tuple) else each).requires_grad for each in found):
            raise UntrainableError
        return gather([Batch(each) for each in outputs]), whole(self.case.kind, found, pieces)


class _Piped(_Way):
    def __init__(self, case: Case, built: Built, steps: bool, pipe: GPipe, placement: list[int]) -> None:
        super().__init__(case, built, steps)
        self.pipe = pipe
        self.placement = placement

    def forward(self, x: Tensor, target: Tensor) -> tuple[Any, Tensor]:
        value = self.built.enter(x * 1)
        before = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value)
        if self.steps:
            loss, output = self._step(value, target)
        else:
            output = self.pipe(value)
            loss = whole(self.case.kind, [self.loss(output, target)], [len(x)])
        expect_equal({"input": value}, {"input": before}, tolerance=0)
        return output, loss

    def _step(self, value: Any, target: Tensor) -> tuple[Tensor, Any]:
        kind = self.case.kind
        return self.pipe.step(
            value,
            target,
            loss_fn=_Loss(self.built.head, self.loss) if kind.is_module else self.loss,
            schedule=self._schedule(len(target)),
            reduction=kind.reduction,
            return_outputs=True,
        )

    def _schedule(self, rows: int) -> str | Schedule:
        case = self.case
        if isinstance(case.schedule, str):
            plain = case.schedule == "interleaved" and case.workers is None
            return "1f1b" if plain else case.schedule
        m = len(torch.empty(rows).chunk(case.chunks))
        stop = {"never": 0, "except_last": m - 1, "always": m}[case.checkpoint] if case.training else 0
        return some_schedule(case.schedule, m, self.placement, stop, in_order=case.in_order)


class _Loss(nn.Module):
    def __init__(self, head: nn.Module, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.head = head
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self.function(output, target)


def _each_run(case: Case, built: Built, way: _Plain | _Piped) -> list[Seen]:
    """Forward and backward for each run; or all forwards first, then all backwards."""
    seen = []
    waiting: list[tuple[Tensor, Any, Tensor]] = []
    for run in range(len(case.rows)):
        x = case.inputs(run)
        waiting.append((x, *way.forward(x, case.targets(run))))
        if case.together and not way.steps and run + 1 < len(case.rows):
            continue
        while waiting:
            x, output, loss = waiting.pop()
            flags = [leaf.requires_grad for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if loss.requires_grad:
                loss.backward()
            seen.append(_seen(built, x, output, loss) | ({} if way.steps else {"flags": flags}))
        if case.optimizes:
            _optimize(built.parameters.values())
    return seen


def _seen(built: Built, x: Tensor, output: Any, loss: Tensor) -> Seen:
    gradients = {f"{name}.grad": parameter.grad for name, parameter in built.parameters.items()}
    found = {"loss": loss, "output": output, "input.grad": x.grad, **gradients, **built.model.state_dict()}
    found = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), found)
    return found | {"counts": dict(sorted(built.tally.counts.items()))}


def _optimize(parameters: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.to_dense(), alpha=0.1)


def expect_equal(found: Seen, expected: Seen, tolerance: float, zeros_for_none: bool = False) -> None:
    """Raise AssertionError, naming what is not the same.

    Args:
        zeros_for_none: whether zeros may be expected where None is found, and calls of hooks that see only these.
    """
    assert list(found) == list(expected)
    found = {name: value for name, value in found.items() if not (zeros_for_none and name == "counts")}
    for name, value in found.items():
        leaves, tree = pytree.tree_flatten(value)
        others, other_tree = pytree.tree_flatten(expected[name])
        assert tree == other_tree, f"{name} is {tree}, expected {other_tree}"
        for leaf, other in zip(leaves, others, strict=True):
            missing = zeros_for_none and leaf is None and other is not None and not other.count_nonzero()
            assert missing or _equal(leaf, other, tolerance), f"{name} has {leaf}, expected {other}"


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if (a.dtype, a.layout, a.shape) != (b.dtype, b.layout, b.shape):
        return False
    return torch.allclose(a.to_dense(), b.to_dense(), rtol=tolerance, atol=tolerance, equal_nan=True)

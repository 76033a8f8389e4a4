"""Combinations of unusual layers: a pipe matches the plain loop over micro-batches, or raises.

Other uses of a pipe between steps are in test_any_order.py. After an error there are no gradients, and its type is
types that callers expect.
"""

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.schedule import SCHEDULES, v_placement

from .layers import DOUBLE, MODES, gradients, running
from .odd_layers import NAMES, OUTSIDE, WIDTH, Odd, draws, make
from .schedules import balance_by, suited

REFUSALS = (RuntimeError, ValueError, TypeError)

LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda y, t: (y - t).square().mean(),
    "sum": lambda y, t: (y - t).square().sum(),
    "counted": lambda y, t: ((y - t).square().sum(), y.numel()),
    "dropout": lambda y, t: (nn.functional.dropout(y) - t).square().mean(),
}


@dataclass(frozen=True)
class Step:
    """A step of training, a forward and backward of the caller's without a schedule, or an evaluation."""

    evaluates: bool
    schedule: str | None
    loss: str
    rows: int
    inline: bool


steps = st.builds(
    Step,
    evaluates=st.sampled_from([False, False, True]),
    schedule=st.none() | st.sampled_from([*sorted(SCHEDULES), "auto", "search"]),
    loss=st.sampled_from(sorted(LOSSES)),
    rows=st.integers(1, 7),
    inline=st.booleans(),
)


@dataclass(frozen=True)
class Combination:
    """A model, a pipe of it, and how both are trained."""

    layers: tuple[str, ...]
    tied: tuple[int, int] | None
    stages: int
    seed: int
    workers: int | None
    """The number of workers; None: one per stage; 0: placed in a V."""
    chunks: int
    modes: tuple[str, ...]
    grad: bool
    steps: tuple[Step, ...]

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        model = nn.Sequential(*map(make, self.layers))
        owners = [layer for layer in model if isinstance(layer, Odd)]
        if self.tied and owners:
            a, b = (owners[k % len(owners)] for k in self.tied)
            a.linear.weight = b.linear.weight
        return model

    def pipe(self, layers: nn.Sequential) -> GPipe:
        balance = balance_by(self.seed, len(layers), self.stages)
        stages = len(balance)
        places = v_placement(stages) if self.workers == 0 and stages % 2 == 0 else range(stages)
        if self.workers:
            places = [j % self.workers for j in places]
        return GPipe(
            layers,
            balance,
            devices=[f"cpu:{place}" for place in places],
            chunks=self.chunks,
            checkpoint=[self.modes[j % len(self.modes)] for j in range(stages)],
        )


def one_counts(names: list[str]) -> bool:
    """Return whether at most one layer uses the global counter, whose values seen by other partitions differ."""
    return sum(name in ("outside", "polite") for name in names) <= 1


combinations = st.builds(
    Combination,
    layers=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).filter(one_counts).map(tuple),
    tied=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    stages=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    workers=st.none() | st.integers(0, 2),
    chunks=st.integers(1, 4),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=3).map(tuple),
    grad=st.booleans(),
    steps=st.lists(steps, min_size=1, max_size=4).map(tuple),
)


def looped(model: nn.Sequential, case: Combination, step: Step, x: Tensor, y: Tensor) -> Any:
    """Run the plain model, on one micro-batch at a time."""
    counted = step.loss == "counted" and step.schedule is not None  # which divides by the count in the end
    losses, outputs, leaves = [], [], []
    for part, target in zip(x.chunk(case.chunks), y.chunk(case.chunks), strict=True):
        leaves.append(part.clone().requires_grad_(case.grad))
        with torch.set_grad_enabled(not step.evaluates):
            output = model(leaves[-1] * 1)
            loss = (output - target).square().sum() / (1 if counted or step.loss == "sum" else y.numel())
        if not step.evaluates:
            loss.backward()
        losses.append(loss.detach())
        outputs.append(output.detach())
    count = y.numel() if counted else 1
    for leaf in (*leaves, *model.parameters()):
        leaf.grad = None if leaf.grad is None else leaf.grad / count
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    gradient = None if all(leaf.grad is None for leaf in leaves) else torch.cat(found)
    return sum(losses) / count, torch.cat(outputs), gradient


def piped(pipe: GPipe, case: Combination, step: Step, x: Tensor, y: Tensor) -> Any:
    loss_fn, leaf = LOSSES[step.loss], x.clone().requires_grad_(case.grad)
    options: Any = {"loss_fn": loss_fn, "reduction": "sum" if step.loss == "sum" else "mean", "return_outputs": True}
    with running(step.inline):
        if step.evaluates:
            return (*pipe.evaluate(x, y, **options), None)
        if step.schedule is not None:
            return (*pipe.step(leaf * 1, y, schedule=suited(step.schedule, pipe), **options), leaf.grad)
        output = pipe(leaf * 1)
        found = loss_fn(output, y)
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        loss.backward()
        return loss.detach(), output.detach(), leaf.grad


def alone(model: nn.Sequential, case: Combination, step: Step, x: Tensor, y: Tensor) -> Any:
    """Run a pipe of one partition, in which dropout masks are known."""
    with closing(GPipe(model, [len(model)], devices=["cpu"], chunks=case.chunks, checkpoint="never")) as pipe:
        return piped(pipe, case, replace(step, inline=True, schedule=step.schedule and "1f1b"), x, y)


def seen(way: Callable[..., Any], model: nn.Module, case: Combination, step: Step, k: int) -> Any:
    """Return all observable results of ``way``: values that must be equal, and numbers."""
    torch.manual_seed(k)
    found = way(model, case, step, inputs(k, step.rows), inputs(99, step.rows))
    layers = [layer for layer in model.modules() if isinstance(layer, Odd)]
    attributes = [(layer.kind, layer.value, layer.training) for layer in layers]
    same = attributes, "outside" in case.layers or OUTSIDE["calls"]
    return same, [found, gradients(model), dict(model.state_dict()), torch.get_rng_state()]


def expect_equal_or_refused(case: Combination) -> None:
    """Compare a pipe with the plain model. Each step subtracts the gradients from the parameters."""
    plain = case.model()
    try:
        pipe = case.pipe(copy.deepcopy(plain))
    except REFUSALS as error:
        event(f"not made: {str(error)[:70]}")
        return
    with closing(pipe):
        for k, step in enumerate(case.steps):
            step = replace(step, loss="mean" if step.loss == "dropout" and step.schedule is None else step.loss)
            by_pipe = step.loss == "dropout" or any(map(draws, case.layers))
            calls = OUTSIDE["calls"]
            try:
                expected = seen(alone if by_pipe else looped, plain, case, step, k)
            except (*REFUSALS, ZeroDivisionError) as error:
                expected = error
            OUTSIDE["calls"] = calls
            try:
                found = seen(piped, pipe, case, step, k)
            except (*REFUSALS, ZeroDivisionError) as error:
                expect_no_harm(error, expected, None if step.schedule is None else pipe)
                return
            if isinstance(expected, Exception):
                return
            event("equal")
            assert torch.is_grad_enabled()
            assert found[0] == expected[0]
            torch.testing.assert_close(found[1], expected[1], rtol=1e-7, atol=1e-9, equal_nan=True)
            for model in (plain, pipe):
                if [*model.parameters()]:
                    torch.optim.SGD(model.parameters(), 0.01).step()
                model.zero_grad()
            for own, other in zip(pipe, plain, strict=True):
                if isinstance(own, Odd):  # a recomputation whose output is the same may append
                    own.all = [*other.all]


def expect_no_harm(error: Exception, expected: Any, stepped: GPipe | None) -> None:
    assert str(error)
    assert isinstance(error, REFUSALS) or type(error) is type(expected)
    assert torch.is_grad_enabled()
    assert stepped is None or all(parameter.grad is None for parameter in stepped.parameters())
    event(f"{'both' if isinstance(expected, Exception) else 'refused'}: {str(error)[:70]}")


def inputs(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@settings(
    max_examples=settings.default.max_examples * 2,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],  # an explanation takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(combinations)
def test_any_combination_is_right_or_refused(case: Combination) -> None:
    OUTSIDE["calls"] = 0
    expect_equal_or_refused(case)

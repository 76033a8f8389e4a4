"""Any sequence of operations on a pipe has the same effects as on the model.

Operations are steps, forwards and backwards with others between them, failing steps, and evaluations. Between them,
layers are frozen, hooked, replaced, copied, saved and loaded, moved to other partitions, or change their checkpointing.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn

import gpipe
from gpipe import DeferredBatchNorm, GPipe
from gpipe.schedule import SCHEDULES
from microbatch import Batch, gather

from .layers import DOUBLE, MODES, gradients
from .models import (
    CHANNELS,
    PARTS,
    WIDTH,
    Failing,
    OnMain,
    Recipe,
    WholeNorms,
    assert_close,
    main_of,
    recipes,
    with_main,
)
from .module.test_step import LOSSES, Way, floats, kinds_of_loss, waiting, ways, weights_for, whole
from .schedules import suited

PHASES = ("forward", "backward", "recompute")

rows = st.integers(1, 9)
numbers = st.integers(0, 2**16)
schedules = st.sampled_from([*sorted(SCHEDULES), "auto", "search"])


class FailsError(Exception):
    """Raised by layers."""


@dataclass
class Order:
    """When a layer is to fail: a certain time in a phase."""

    where: int
    phase: str
    time: int
    calls: int = 0

    def error(self, phase: str) -> Exception | None:
        """Return the error to raise now, if any; ``"backward"`` is passed in the forward whose backward fails."""
        if self.phase != phase:
            return None
        self.calls += 1
        return FailsError("boom") if self.calls == self.time else None


ORDERS: list[Order] = []
"""The current order, if any. It is not an attribute of layers, as that would become part of their saved state."""


def fails(number: int) -> nn.Module:
    def asked(phase: str, _: Tensor) -> Exception | None:
        return next((order.error(phase) for order in ORDERS if order.where == number), None)

    return Failing(asked)


def doubled(value: Any) -> Any:
    return with_main(value, main_of(value) * 2)


def damped(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook that puts a hook on a tensor."""
    x = main_of(output) * 1
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return with_main(output, x)


def steeper(parameter: Tensor) -> None:
    parameter.grad *= 1.5


HOOKS: dict[str, Callable[[nn.Module, nn.Parameter | None], object]] = {
    "forward": lambda layer, _: layer.register_forward_hook(lambda module, inputs, output: doubled(output)),
    "before": lambda layer, _: layer.register_forward_pre_hook(lambda module, inputs: (doubled(inputs[0]),)),
    "tensor": lambda layer, _: layer.register_forward_hook(damped),
    "gradient": lambda _, own: own is not None and own.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)),
    "accumulated": lambda _, own: own is not None and own.register_post_accumulate_grad_hook(steeper),
}


class Forward:
    """One that waits for its backward."""

    def __init__(self, output: Any, leaf: Tensor, keeps: object = None) -> None:
        self.leaf = leaf
        self._keeps = keeps
        weighed = zip(floats(output), weights_for(output, 0), strict=True)
        self._terms = [(tensor * weight).mean() for tensor, weight in weighed if tensor.requires_grad]

    def backward(self) -> None:
        if self._terms:
            torch.stack(self._terms).sum().backward()


class AnyOrder(RuleBasedStateMachine):
    """A pipe, and the model that all is done with as well."""

    @initialize(
        recipe=recipes(), way=ways, tied=st.lists(st.tuples(numbers, numbers), max_size=2), at=st.tuples(rows, rows)
    )
    def begin(self, recipe: Recipe, way: Way, tied: list[tuple[int, int]], at: tuple[int, int]) -> None:
        self.recipe = replace(recipe, dtype=DOUBLE, training=True, input_needs_grad=True)
        self.way, self.count = way, 0
        self.waiting: list[tuple[Forward, Forward]] = []
        layers = list(self.recipe.model())
        for number, place in enumerate(at):
            layers.insert(place % (len(layers) + 1), fails(number))
        tie(layers, tied)
        self.plain = nn.Sequential(*layers)
        self.draws = any(PARTS[name].draws for _, name in recipe.layers)
        if recipe.deferred and self.draws:
            self.plain = DeferredBatchNorm.convert_deferred_batch_norm(self.plain)
        self.make(recipe.stages, recipe.balance_seed, recipe.chunks)

    def make(self, stages: int, seed: int, chunks: int) -> None:
        balance = replace(self.recipe, balance_seed=seed, stages=stages).balance(len(self.plain))
        self.pipe = GPipe(
            copy.deepcopy(self.plain),
            balance,
            devices=self.way.devices(len(balance)),
            chunks=chunks,
            checkpoint=self.recipe.modes(len(balance)),
            deferred_batch_norm=self.recipe.deferred,
        )

    def teardown(self) -> None:
        if hasattr(self, "pipe"):
            self.pipe.close()

    # Comparisons.

    def forward(self, x: Tensor) -> tuple[Any, object]:
        """Return the model's output: computed by micro-batch or, with random layers, by a single-partition pipe.

        The second value must stay alive until the backward.
        """
        if self.draws:
            options: dict[str, Any] = {"chunks": self.pipe.chunks, "deferred_batch_norm": self.recipe.deferred}
            one = GPipe(self.plain, [len(self.plain)], devices=["cpu"], checkpoint="never", **options)
            return one(x), one
        with WholeNorms(self.plain) if self.recipe.deferred else nullcontext():
            return gather([Batch(self.plain(part.clone())) for part in x.chunk(self.pipe.chunks)]), None

    def input(self, count: int) -> Tensor:
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        return torch.randn(count, CHANNELS, WIDTH, generator=generator, dtype=DOUBLE)

    def done(self, work: Callable[[], Any]) -> Any:
        """Return the result of ``work`` and the generator's state after it, starting from a fixed state."""
        torch.manual_seed(self.count)
        return work(), torch.get_rng_state()

    def expected_step(self, x: Tensor, loss: str) -> tuple[dict[str, Any], Any] | None:
        """Return a step's result and loss weights, without changing anything; None if there is nothing to train."""
        before, leaf = copy.deepcopy(self.plain.state_dict()), x.clone().requires_grad_()
        with gpipe.inline():
            output, _keeps = self.forward(leaf * 1)
            weights = weights_for(output, 0)
            total = whole(loss, output, weights)
            if not total.requires_grad:
                self.plain.load_state_dict(before)
                return None
            total.backward()
        return {"loss": total.detach(), "output": detached(output), "input": leaf.grad}, weights

    def weights(self, x: Tensor) -> Any:
        """Return the weights of a step's loss, without changes; None if there is nothing to train."""
        before = copy.deepcopy(self.plain.state_dict())
        with gpipe.inline():
            output, _keeps = self.forward(x.clone().requires_grad_() * 1)
        with torch.no_grad():
            self.plain.load_state_dict(before)
        return weights_for(output, 0) if any(tensor.requires_grad for tensor in floats(output)) else None

    def stepped(self, x: Tensor, weights: Any, loss: str, schedule: str | None) -> dict[str, Any]:
        leaf, (loss_fn, how) = x.clone().requires_grad_(), LOSSES[loss]
        with self.way.where():
            schedule = suited(schedule, self.pipe)
            schedule = waiting(schedule) if loss == "whole" else schedule
            total, output = self.pipe.step(
                leaf * 1, weights, loss_fn=loss_fn, schedule=schedule, return_outputs=True, **how
            )
        return {"loss": total, "output": floats(output), "input": leaf.grad}

    def assert_equal(self, found: Any, expected: Any) -> None:
        assert_close(found, expected, self.recipe)

    def assert_alike(self) -> None:
        """The pipe and the model have the same gradients and the same state."""
        self.assert_equal(gradients(self.pipe), gradients(self.plain))
        self.assert_equal(dict(self.pipe.state_dict()), dict(self.plain.state_dict()))

    def align(self) -> None:
        """Resynchronize after a failure that leaves the state undefined."""
        with torch.no_grad():
            self.pipe.load_state_dict(self.plain.state_dict())
        self.forget()

    def forget(self) -> None:
        self.pipe.zero_grad()
        self.plain.zero_grad()
        self.waiting.clear()

    # Rules.

    @rule(count=rows, loss=kinds_of_loss, schedule=schedules)
    def step(self, count: int, loss: str, schedule: str) -> None:
        x = self.input(count)
        expected, end = self.done(lambda: self.expected_step(x, loss))
        if expected is not None:
            found = self.done(lambda: self.stepped(x, expected[1], loss, schedule))
            self.assert_equal(found, (expected[0], end))
            self.assert_alike()

    @rule(count=rows, where=st.integers(0, 1), phase=st.sampled_from(PHASES), time=st.integers(1, 4),
          loss=kinds_of_loss, schedule=schedules)  # fmt: skip
    def step_that_fails(self, count: int, where: int, phase: str, time: int, loss: str, schedule: str) -> None:
        x = self.input(count)
        weights = self.weights(x)
        if weights is None:
            return
        before = gradients(self.pipe)
        copies = {name: None if each is None else each.clone() for name, each in before.items()}
        ORDERS[:] = [Order(where, phase, time)]
        try:
            found = self.done(lambda: self.stepped(x, weights, loss, schedule))
        except FailsError as error:
            assert any("micro-batch" in note for note in error.__notes__)  # noqa: PT017
            now = gradients(self.pipe)
            assert all(now[name] is None for name, each in before.items() if each is None)
            is_drained = loss == "whole" or schedule == "fill_drain"
            if loss == "counted" or (phase == "forward" and is_drained):
                assert all(now[name] is each for name, each in before.items())
                self.assert_equal(now, copies)
            self.align()
            return
        finally:
            ORDERS.clear()
        self.assert_step(found, x, loss)

    def assert_step(self, found: Any, x: Tensor, loss: str) -> None:
        expected, end = self.done(lambda: self.expected_step(x, loss))
        self.assert_equal(found, (expected[0], end))
        self.assert_alike()

    @precondition(lambda self: len(self.waiting) < 3)
    @rule(count=rows)
    def begin_forward(self, count: int) -> None:
        x = self.input(count)
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        with gpipe.inline():
            (expected, keeps), end = self.done(lambda: self.forward(other * 1))
        with self.way.where():
            found = self.done(lambda: self.pipe(leaf * 1))
        self.assert_equal((detached(found[0]), found[1]), (detached(expected), end))
        assert [each.requires_grad for each in floats(found[0])] == [each.requires_grad for each in floats(expected)]
        self.assert_alike()
        self.waiting.append((Forward(found[0], leaf), Forward(expected, other, keeps)))

    @precondition(lambda self: self.waiting)
    @rule(k=st.integers(0, 2))
    def backward(self, k: int) -> None:
        found, expected = self.waiting.pop(k % len(self.waiting))
        try:
            with gpipe.inline():
                expected.backward()
        except RuntimeError:  # from torch: a tensor saved for the backward was changed
            self.forget()
            return
        try:
            with self.way.where():
                found.backward()
        except RuntimeError as error:
            assert "between the forward" in str(error) or "inplace operation" in str(error)  # noqa: PT017
            self.align()
            return
        self.assert_equal(found.leaf.grad, expected.leaf.grad)
        self.assert_alike()

    @rule(count=rows, loss=kinds_of_loss)
    def evaluate(self, count: int, loss: str) -> None:
        x, (loss_fn, how) = self.input(count), LOSSES[loss]
        with torch.no_grad(), gpipe.inline():
            (output, _keeps), end = self.done(lambda: self.forward(x.clone()))
        weights = weights_for(output, 0)
        with self.way.where():
            (total, found), own = self.done(
                lambda: self.pipe.evaluate(x.clone(), weights, loss_fn=loss_fn, return_outputs=True, **how)
            )
        self.assert_equal((total, floats(found), own), (whole(loss, output, weights), floats(output), end))
        self.assert_alike()

    @rule()
    def update(self) -> None:
        with torch.no_grad():
            for parameter in (*self.pipe.parameters(), *self.plain.parameters()):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1 + parameter.grad.abs().max()), alpha=0.05)
        self.pipe.zero_grad()
        self.plain.zero_grad()

    @rule(modes=st.lists(st.sampled_from(MODES), min_size=1))
    def checkpoint(self, modes: list[str]) -> None:
        self.pipe.checkpoint = [modes[j % len(modes)] for j in range(len(self.pipe.balance))]

    @rule(chunks=st.integers(1, 6))
    def chunks(self, chunks: int) -> None:
        self.pipe.chunks = chunks

    @rule(k=st.none() | numbers, training=st.booleans())
    def train(self, k: int | None, training: bool) -> None:
        for model in (self.pipe, self.plain):
            (model if k is None else model[k % len(model)]).train(training)

    @rule(k=numbers, trained=st.booleans())
    def freeze(self, k: int, trained: bool) -> None:
        for model in (self.pipe, self.plain):
            model[k % len(model)].requires_grad_(trained)

    @rule(k=numbers, kind=st.sampled_from(sorted(HOOKS)))
    def hook(self, k: int, kind: str) -> None:
        for model in (self.pipe, self.plain):
            layer = model[k % len(model)]
            HOOKS[kind](layer, next((each for each in layer.parameters() if each.requires_grad), None))

    @rule(seed=numbers, stages=st.integers(1, 4))
    def save_and_load(self, seed: int, stages: int) -> None:
        state, chunks = self.pipe.state_dict(), self.pipe.chunks
        self.pipe.close()
        own = self.plain = copy.deepcopy(self.plain)
        self.plain = copy.deepcopy(own)
        with torch.no_grad():
            for parameter in self.plain.parameters():
                parameter.add_(1)
        self.make(stages, seed, chunks)
        self.plain = own
        self.pipe.load_state_dict(state)
        self.forget()

    @rule()
    def copy(self) -> None:
        self.pipe.close()
        self.pipe, self.plain = copy.deepcopy(self.pipe), copy.deepcopy(self.plain)
        self.forget()

    @rule()
    def close(self) -> None:
        self.pipe.close()


def tie(layers: list[nn.Module], pairs: list[tuple[int, int]]) -> None:
    """Let pairs of linear layers have one weight."""
    linears = [layer.layer for layer in layers if is_square(layer)]
    for a, b in pairs if linears else []:
        linears[a % len(linears)].weight = linears[b % len(linears)].weight


def is_square(layer: nn.Module) -> bool:
    """Return whether a layer is interchangeable with others of its kind."""
    return isinstance(layer, OnMain) and type(layer.layer) is nn.Linear and layer.layer.weight.shape == (WIDTH, WIDTH)


def detached(output: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in floats(output)]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=settings.default.max_examples * 2,
    stateful_step_count=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

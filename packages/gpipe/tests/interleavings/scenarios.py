"""Run a step of a pipe in any order of events, perhaps with a failure, and check the state that it leaves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from packages.streams.tests.interleavings.explore import Interleaving
from packages.streams.tests.interleavings.objects import Lock, RLock, active
from packages.streams.tests.interleavings.scheduler import FAIL, INTERRUPT, InjectedError
from torch import Tensor, nn

import gpipe
from gpipe import GPipe
from gpipe._current import current
from gpipe._torch import is_intercepting
from gpipe.checkpoint import _operations
from gpipe.engine import _run_lock
from gpipe.model import _called
from gpipe.schedule import Kind

from ..layers import assert_same, linear, on_backward, rows, squares, trained

INJECTS = (FAIL, INTERRUPT)
"""A failure at a point of a layer, and KeyboardInterrupt in the main thread."""


class Point(nn.Module):
    """The identity. In its forward and its backward, threads may be switched, and a failure may be injected.

    The program fails if two threads are in it at once, if it is called in the turn of a different stage, or while its
    pipe is not running: see :func:`running`.

    Args:
        name: its name in events.
        stage: the index of its stage; None if there is no pipe.
        backward: whether there is a point in the backward. Without it, the backward can be split.

    Attributes:
        inside: the number of threads in it.
        is_at_rest: whether no run of its pipe is in progress.
    """

    def __init__(self, name: str, stage: int | None = None, *, backward: bool = True) -> None:
        super().__init__()
        self.name, self.stage, self.backward = name, stage, backward
        self.inside, self.is_at_rest = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self._pass(f"forward of {self.name}")
        return on_backward(x, lambda: self._pass(f"backward of {self.name}")) if self.backward else x

    def _pass(self, name: str) -> None:
        if not is_scheduled():
            return
        step = current.work.step
        expect(not self.inside, f"two threads are in the {name}")
        expect(not self.is_at_rest, f"the {name} is computed after the run")
        if step is not None and self.stage is not None and step.action.kind != Kind.LOSS:  # it may call the model
            expect(step.stage == self.stage, f"the {name} is computed in {step}")
        self.inside += 1
        try:
            point(name)
        finally:
            self.inside -= 1


@contextmanager
def running(pipe: nn.Module) -> Iterator[None]:
    """Expect the layers of ``pipe`` to run only inside a ``with`` block."""
    own = [each for each in pipe.modules() if isinstance(each, Point)]
    for each in own:
        each.is_at_rest = False
    try:
        yield
    finally:
        for each in own:
            each.is_at_rest = True
            expect(not each.inside, f"the run has ended, but not {each.name}")


def expect(is_right: bool, message: str) -> None:
    """Make the program fail unless ``is_right``, even if a pipe catches or hides the error."""
    if not is_right and active:
        active[-1].report(AssertionError(message))


def is_scheduled() -> bool:
    return bool(active) and active[-1].controls_this_thread()


def point(name: str, *, pause: bool = False) -> None:
    """Allow a switch of threads, and an injected failure.

    Args:
        name: the name of the event.
        pause: whether a switch costs no preemption. An exploration then tries it first.
    """
    if is_scheduled():
        active[-1].step(name, fails=True, pause=pause)


class Scenario(NamedTuple):
    """A program that trains a pipe for one step in any order, checks the pipe, and trains a second step.

    Attributes:
        model: a function that creates the model, with the same parameters in each call.
        schedule: the schedule of ``step``; None for a call and its backward; "evaluate" for an evaluation.
        options: the arguments of the pipe.
        inline: whether the pipe runs inline, without threads.
        loss_fn: the loss of a step.
        count: the number of rows.
        draws: whether layers use random numbers. If so, a step is compared with a step of an inline pipe.
    """

    name: str
    model: Callable[[], nn.Module]
    balance: tuple[int, ...]
    schedule: str | None
    options: dict[str, Any]
    inline: bool = False
    loss_fn: Callable[..., Any] = squares
    count: int = 4
    draws: bool = False

    def __call__(self) -> None:
        model, expected = plain(self.model, self.schedule, self.loss_fn, self.count)
        if self.draws:
            expected = self.drawn()
        with certain():
            pipe = GPipe(copy.deepcopy(model), list(self.balance), **self.pipe_options())
        calls: list[Tensor] = []
        first = next(iter(pipe.parameters()))
        first.register_hook(calls.append)
        failure = None
        try:
            with running(pipe):
                self.train(pipe)
        except (InjectedError, KeyboardInterrupt) as error:
            failure = type(error)
        expect_nothing_left(pipe)
        if failure is None or self.schedule is not None:  # otherwise, as after a failed backward of a plain model
            expect_gradients(pipe, expected, failed=failure is not None)
        assert list((first._backward_hooks or {}).values()) == [calls.append], "a hook is lost"
        calls.clear()
        pipe.zero_grad()
        with certain(), running(pipe):
            self.train(pipe)
        assert len(calls) == (self.schedule != "evaluate"), f"{len(calls)} calls of a hook in the second step"
        expect_gradients(pipe, expected, failed=False)
        expect_nothing_left(pipe)
        if not self.inline:
            close(pipe)
            assert_no_threads()

    def pipe_options(self) -> dict[str, Any]:
        return {"devices": ["cpu"] * len(self.balance), "chunks": 2, "checkpoint": "never", **self.options}

    def drawn(self) -> dict[str, Tensor | None]:
        """Return the gradients of a step of an inline pipe."""
        model, _ = plain(self.model, self.schedule, self.loss_fn, self.count)
        with certain():
            pipe = GPipe(copy.deepcopy(model), list(self.balance), **self.pipe_options())
            self._replace(inline=True).train(pipe)
        return {name: parameter.grad for name, parameter in pipe.named_parameters()}

    def train(self, pipe: GPipe) -> None:
        torch.manual_seed(7)
        random.seed(7)
        with gpipe.inline() if self.inline else nullcontext():
            if self.schedule == "evaluate":
                pipe.evaluate(rows(self.count), loss_fn=self.loss_fn)
            else:
                trained(pipe, rows(self.count), self.schedule, self.loss_fn)


def close(pipe: GPipe) -> None:
    """Close ``pipe``, and repeat this after an interrupt."""
    try:
        pipe.close()
    except KeyboardInterrupt:
        with certain():
            pipe.close()


@contextmanager
def certain() -> Iterator[None]:
    """Inject nothing inside a ``with`` block, and run threads in the default order."""
    if not active:
        yield
        return
    with patch.object(active[-1], "_injects", frozenset()), patch.object(active[-1], "_chooser", _Default()):
        yield


@contextmanager
def certain_until() -> Iterator[Callable[[], None]]:
    """Do the same as :func:`certain` until the yielded function is called. Only events after that are explored."""
    with ExitStack() as scope:
        scope.enter_context(certain())
        yield scope.close


class _Default:
    def choose(self, options: Any, step: int) -> int:
        return 0


@cache
def plain(
    model: Callable[[], nn.Module], schedule: str | None, loss_fn: Callable[..., Any], count: int
) -> tuple[nn.Module, dict[str, Tensor | None]]:
    """Return a model without gradients, and the gradients of one of its steps."""
    found = model()
    if schedule != "evaluate":
        trained(found, rows(count), None, loss_fn)
    expected = {name: parameter.grad for name, parameter in found.named_parameters()}
    found.zero_grad()
    return found, expected


def expect_gradients(pipe: nn.Module, expected: dict[str, Tensor | None], *, failed: bool) -> None:
    """Expect these gradients. After a failure, all of them may be None instead."""
    actual = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    if failed and all(gradient is None for gradient in actual.values()):
        return
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def expect_nothing_left(pipe: GPipe) -> None:
    """Expect that no lock is held, and that no state of a run is left in this thread or in the modules of the pipe."""
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not is_intercepting()
    assert not torch._C._len_torch_function_stack()
    assert _called._thread.by is None
    assert current.work.step is None
    assert _run_lock._inside.holds == _run_lock._inside.serves == ()
    assert not _run_lock._claimed
    held = [lock for lock in locks() if lock.is_held()]
    assert not held, f"{len(held)} locks are still held"
    for module in pipe.modules():
        assert not any(type(value).__name__ == "_Interception" for value in vars(module).values())


def locks() -> list[Any]:
    return [each for each in active[-1].objects if isinstance(each, (Lock, RLock))] if active else []


def assert_no_threads() -> None:
    tasks = active[-1].tasks[1:] if active else []
    # A thread that Python has forgotten still ends, or else the scheduler reports it after the program.
    left = [task.name for task in tasks if not task.is_done and not getattr(task.thread, "is_forgotten", False)]
    assert not left, f"threads are left after close(): {left}"


@contextmanager
def fast() -> Iterator[None]:
    """List the operations of torch once instead of once per pipe."""
    with patch.object(_operations._torch, "operation_names", lru_cache(_operations._torch.operation_names)):
        yield


def line(name: str, found: Interleaving, injections: int) -> str:
    """Return the command that repeats a run."""
    indices = [*found.indices]
    while len(indices) > 1 and not indices[-1]:
        indices.pop()  # the default
    kind = "f" if injections else ""
    return f"python -m packages.gpipe.tests.interleavings {name} --repeat {kind}{','.join(map(str, indices))}"


def model_of(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return a function that creates a model, with the same parameters in each call."""

    def create() -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*(layer() for layer in layers))

    return create


def points(stages: int, *, backward: bool = True) -> Callable[[], nn.Sequential]:
    """Return a function that creates a model with a linear layer and a point per stage."""
    layers: list[Callable[[], nn.Module]] = []
    for j in range(stages):
        layers += [linear, lambda j=j: Point(f"stage {j}", j, backward=backward)]  # type: ignore[misc]
    return model_of(*layers)


__all__ = ["Point", "Scenario", "assert_same"]

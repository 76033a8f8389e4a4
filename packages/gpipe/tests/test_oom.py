"""A step that runs out of memory is done again with smaller micro-batches, and is then like any with these chunks."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe
from gpipe.distributed import Rank
from gpipe.schedule import SCHEDULES, one_forward_one_backward, v_placement

from .layers import DOUBLE, Call, Raise, assert_same, gradients, linears, piped, rows, running
from .models import Recipe, main_of, recipes, with_main
from .schedules import V_SHAPED
from .test_step import SLOW, Way, floats, losses, ways, weights_for

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

PHASES = ("forward", "backward", "recompute")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "driver": lambda: RuntimeError("CUDA error: out of memory"),
    "python": MemoryError,
}

CASES = [(phase, mode) for phase in PHASES for mode in ("never", "always") if (phase, mode) != ("recompute", "never")]

each_way = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])


class Limited(nn.Module):
    """The identity, with memory for so many rows only, in one phase."""

    def __init__(self, limit: int | None = None, phase: str = "forward", error: str = "cuda") -> None:
        super().__init__()
        self.limit, self.phase, self.error = limit, phase, error

    def forward(self, value: Any) -> Any:
        x = main_of(value)
        if self.limit is not None and len(x) > self.limit:
            if self.phase == ("recompute" if gpipe.is_recomputing() else "forward"):
                raise ERRORS[self.error]()
            if self.phase == "backward" and x.requires_grad:
                return with_main(value, Raise.apply(x, ERRORS[self.error]()))
        return with_main(value, x * 1)


def everything(pipe: GPipe) -> dict[str, Any]:
    """What a step may change."""
    return {
        "gradients": {name: p.grad for name, p in pipe.named_parameters()},
        "state": {name: value.clone() for name, value in pipe.state_dict().items()},
        "generator": torch.get_rng_state(),
    }


def limited(recipe: Recipe, at: int, limit: Limited) -> nn.Sequential:
    """The model of ``recipe`` with ``limit`` before layer ``at``."""
    layers = list(recipe.model())
    layers.insert(at % (len(layers) + 1), limit)
    return nn.Sequential(*layers)


def pipe_of(recipe: Recipe, way: Way, model: nn.Sequential, chunks: int) -> GPipe:
    balance = recipe.balance(len(model))
    modes, devices = recipe.modes(len(balance)), way.devices(len(balance))
    return GPipe(
        model, balance, devices=devices, chunks=chunks, checkpoint=modes, deferred_batch_norm=recipe.deferred
    )  # fmt: skip


@settings(SLOW, max_examples=SLOW.max_examples // 4)
@given(recipes(), ways, st.sampled_from(PHASES), st.integers(0, 20), st.integers(1, 5))
def test_it_is_a_step_with_these_chunks(recipe: Recipe, way: Way, phase: str, at: int, limit: int):
    """Bit for bit: loss, outputs, gradients on top of earlier ones, buffers, and all random numbers."""
    recipe = replace(recipe, training=True)
    fails, whole = Limited(phase=phase), Limited()
    with (
        closing(pipe_of(recipe, way, limited(recipe, at, fails), recipe.chunks)) as pipe,
        closing(pipe_of(recipe, way, limited(recipe, at, whole), recipe.chunks)) as twin,
    ):
        for x in recipe.batches():
            fails.limit = None
            with torch.no_grad():
                for each in (twin, pipe):
                    torch.manual_seed(recipe.seed)
                    weights = weights_for(each(x.clone()), recipe.seed)

            before, fails.limit = pipe.chunks, limit
            try:
                found = stepped(pipe, x, weights, way, recipe)
            except (ValueError, torch.OutOfMemoryError):  # nothing to train, or it cannot be cut smaller
                assert pipe.chunks == before
                return
            twin.chunks = pipe.chunks
            assert_equal(found, stepped(twin, x, weights, way, recipe))


def stepped(pipe: GPipe, x: Tensor, weights: list[Tensor], way: Way, recipe: Recipe) -> Any:
    """What a step gives and leaves behind."""
    torch.manual_seed(recipe.seed)
    leaf = x.clone().requires_grad_(recipe.input_needs_grad)
    how = {"schedule": way.name(len(pipe.partitions)), "return_outputs": True, "on_oom": "smaller chunks"}
    with way.where():
        loss, output = pipe.step(leaf * 1, weights, loss_fn=lambda o, w: losses(o, w).mean(), **how)
    return loss, floats(output), leaf.grad, everything(pipe)


def assert_equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def model(limit: Limited) -> nn.Sequential:
    """Layers that draw, keep statistics and count, around one with little memory."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), limit, nn.Linear(4, 3), nn.Dropout(0.2)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("phase", "mode"), CASES)
@each_way
def test_in_each_phase_of_each_schedule(
    schedule: str, phase: str, mode: str, inline: bool, caplog: pytest.LogCaptureFixture
):
    devices = [f"cpu:{j}" for j in v_placement(4)] if schedule in V_SHAPED else ["cpu"] * 4
    options = {"devices": devices, "chunks": 2, "checkpoint": mode, "deferred_batch_norm": True}
    found = []
    with running(inline):
        for limit, chunks in ((2, 2), (None, 4)):
            with closing(GPipe(model(Limited(limit, phase)), [1, 2, 1, 2], **options)) as pipe:
                pipe.chunks = chunks
                for parameter in pipe.parameters():
                    parameter.grad = torch.ones_like(parameter)
                torch.manual_seed(1)
                loss = pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, schedule=schedule, on_oom="smaller chunks")
                assert pipe.chunks == 4
                found.append((loss, everything(pipe)))
    assert_equal(*found)
    [said] = [each.getMessage() for each in caplog.records if "ran out of memory" in each.getMessage()]
    assert "partition 2 on cpu" in said
    assert "chunks=2 (micro-batches of 4 rows); the step is done again with chunks=4 (2 rows)" in said
    assert "batch norm" in said


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain", "zero_bubble"])
@each_way
def test_in_the_loss(schedule: str, inline: bool):
    plain = linears(3)
    with closing(piped(plain, [2, 1], chunks=2)) as pipe, running(inline):
        loss = pipe.step(rows(7), rows(7), loss_fn=small_loss, schedule=schedule, on_oom="smaller chunks")
        expected = F.mse_loss(plain(rows(7)), rows(7))
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(pipe, plain)
        assert pipe.chunks == 4


def small_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(Limited(2)(output), target)


@pytest.mark.parametrize("error", list(ERRORS))
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_says_that_memory_ran_out(error: str, wrapped: bool):
    def layer(x: Tensor) -> Tensor:
        try:
            return Limited(1, error=error)(x)
        except (RuntimeError, MemoryError) as raised:
            if wrapped:
                raise ArithmeticError("the library that is called here") from raised
            raise

    with closing(piped(nn.Sequential(*linears(1), Call(layer)), [1, 1], chunks=2)) as pipe:
        pipe.step(rows(4), rows(4), loss_fn=F.mse_loss, on_oom="smaller chunks")
        assert pipe.chunks == 4


def test_others_are_raised_at_once():
    def layer(x: Tensor) -> Tensor:
        calls.append(len(x))
        raise RuntimeError("out of luck")

    calls: list[int] = []
    with closing(piped(nn.Sequential(*linears(1), Call(layer)), [1, 1], chunks=1)) as pipe:
        with pytest.raises(RuntimeError, match="luck"):
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss, on_oom="smaller chunks")
        assert calls == [4]


@each_way
@pytest.mark.parametrize("limit", [0, 1])
def test_a_second_time_raises_the_first_and_leaves_all_as_it_was(limit: int, inline: bool):
    with closing(GPipe(model(Limited(limit)), [1, 5], devices=["cpu"] * 2, chunks=2)) as pipe, running(inline):
        for parameter in list(pipe.parameters())[::2]:
            parameter.grad = torch.ones_like(parameter)
        before = everything(pipe)
        grads = [parameter.grad for parameter in pipe.parameters()]
        with pytest.raises(torch.OutOfMemoryError, match="CUDA") as caught:
            pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, on_oom="smaller chunks")
        assert "chunks=4, which ran out of memory too" in caught.value.__notes__[-1]
        assert_equal(everything(pipe), before)
        assert all(parameter.grad is grad for parameter, grad in zip(pipe.parameters(), grads, strict=True))
        assert pipe.chunks == 2


def test_a_single_row_cannot_be_less():
    with closing(piped(nn.Sequential(*linears(1), Limited(0)), [1, 1], chunks=8)) as pipe:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss, on_oom="smaller chunks")
        assert "a single row already" in caught.value.__notes__[-1]
        assert pipe.chunks == 8


def test_tensors_of_several_numbers_of_rows_are_cut_where_they_belong_together():
    layers = nn.Sequential(Call(lambda both: both[0] + both[1].unflatten(0, (-1, 2)).sum(1)), Limited(4))
    with closing(GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)) as pipe:
        x = torch.randn(10, 3, requires_grad=True)
        pipe.step((x, torch.randn(20, 3)), torch.zeros(10, 3), loss_fn=F.mse_loss, on_oom="smaller chunks")
        assert pipe.chunks == 5  # in 4 they would be 3, 3, 3, 1 and 5, 5, 5, 5


def test_what_the_failed_step_held_is_free_before_the_next():
    """Also what the error's traceback reaches."""

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            held = x * 2
            if len(x) > 2:
                alive.append(weakref.ref(held))
            else:
                gone.extend(each() is None for each in alive)
            return held

    alive: list[Any] = []
    gone: list[bool] = []
    with closing(piped(nn.Sequential(*linears(1), Notes(), *linears(1), Limited(2)), [2, 2], chunks=2)) as pipe:
        gc.disable()
        try:
            pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, on_oom="smaller chunks")
        finally:
            gc.enable()
    assert gone
    assert all(gone)


@each_way
def test_gradients_of_what_is_no_parameter_and_of_the_input(inline: bool):
    """A tensor that a layer and the loss close over, a weight in two stages, and what the input is computed from."""
    free, x = torch.ones(3, dtype=DOUBLE, requires_grad=True), rows(8, grad=True)
    for filled in (False, True):
        free.grad = torch.ones_like(free) if filled else None
        x.grad = torch.ones_like(x) if filled else None
        plain = linears(3)
        plain[2].weight = plain[0].weight
        if filled:
            plain[0].weight.grad = torch.ones_like(plain[0].weight)
        layers = nn.Sequential(plain[0], Call(lambda value: value * free), Limited(2, "backward"), plain[1], plain[2])
        with closing(GPipe(layers, [2, 1, 2], devices=["cpu"] * 3, chunks=2)) as pipe, running(inline):
            other = copy.deepcopy(plain)
            if filled:
                other[0].weight.grad = torch.ones_like(other[0].weight)
            own, leaf = free.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
            for mine, theirs in ((own, free), (leaf, x)):
                mine.grad = None if theirs.grad is None else theirs.grad.clone()
            loss_fn = lambda output, target: F.mse_loss(output, target) + free.sum()  # noqa: E731
            pipe.step(x * 2, rows(8), loss_fn=loss_fn, on_oom="smaller chunks")
            (F.mse_loss(other[2](other[1](other[0](leaf * 2) * own)), rows(8)) + own.sum()).backward()
            for parameter, expected in zip(plain.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, expected.grad)
            torch.testing.assert_close([free.grad, x.grad], [own.grad, leaf.grad])


def test_hooks_of_parameters_fire_once_and_those_of_the_pipe_too():
    calls: list[str] = []
    with closing(piped(nn.Sequential(*linears(2), Limited(2)), [1, 2], chunks=2)) as pipe:
        weight = next(iter(pipe.parameters()))
        weight.register_hook(lambda grad: calls.append("gradient"))
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
        pipe.register_forward_pre_hook(lambda module, inputs: calls.append("input"))
        pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, on_oom="smaller chunks")
    assert calls == ["input", "gradient", "accumulated"]


def test_a_failure_while_gradients_are_added_up_is_not_repeated():
    with closing(piped(linears(2), [1, 1], chunks=2)) as pipe:
        weight = next(iter(pipe.parameters()))
        weight.register_hook(lambda grad: (_ for _ in ()).throw(torch.OutOfMemoryError("in a hook")))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, on_oom="smaller chunks")
        assert "gradients were being added up" in caught.value.__notes__[-1]


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"on_oom": "fewer chunks"}, ValueError, "must be one of 'raise', 'smaller chunks'"),
        ({"schedule": one_forward_one_backward(2, 2)}, ValueError, "schedule"),
        ({"loss_fn": nn.CrossEntropyLoss(torch.ones(3))}, ValueError, r"\(sum, count\)"),
        ({"loss_fn": nn.MSELoss(reduction="sum")}, ValueError, "make them equal"),
        ({"loss_fn": nn.MSELoss(), "reduction": "sum"}, ValueError, "make them equal"),
    ],
)
def test_what_cannot_be_the_same_is_refused(options: dict[str, Any], kind: type[Exception], says: str):
    with closing(piped(linears(2), [1, 1], chunks=2)) as pipe, pytest.raises(kind, match=says):
        pipe.step(rows(4), rows(4), **{"loss_fn": F.mse_loss, "on_oom": "smaller chunks", **options})


def test_ranks_refuse():
    with closing(piped(linears(2), [1, 1])) as pipe, pytest.raises(ValueError, match="more chunks"):
        Rank._step_or_smaller(pipe, None, None, "1f1b", "smaller chunks")


def test_a_layer_of_a_pipe_may_not():
    with closing(piped(linears(2), [1, 1], chunks=2)) as inner:

        def layer(x: Tensor) -> Tensor:
            with torch.enable_grad():
                inner.step(x.detach(), x.detach(), loss_fn=F.mse_loss, on_oom="smaller chunks")
            return x

        layers = nn.Sequential(*linears(1), Call(layer))
        with closing(GPipe(layers, [1, 1], devices=["cpu"] * 2)) as pipe, pytest.raises(RuntimeError, match="outer"):
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss)


class Collects(nn.Module):
    """Keeps a number and a loss of each call in lists, and draws from a generator in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.losses: list[Tensor] = []
        self.generators = {"own": torch.Generator().manual_seed(1)}

    def forward(self, x: Tensor) -> Tensor:
        self.numbers.append(len(x))
        self.losses.append(x.square().mean())
        return x * torch.rand(x.shape, dtype=x.dtype, generator=self.generators["own"]) * len(self.numbers)


@each_way
@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_layers_keep_in_lists_and_dicts(phase: str, schedule: str, inline: bool):
    def trained(limit: int | None, chunks: int) -> Any:
        collects = Collects()
        layers = nn.Sequential(*linears(1), collects, *linears(1), Limited(limit, phase))
        with closing(GPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=chunks)) as pipe, running(inline):
            pipe.checkpoint = "never"
            loss = pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, schedule=schedule, on_oom="smaller chunks")
            return loss, everything(pipe), collects.numbers, [each.item() for each in collects.losses]

    assert_equal(trained(2, 2), trained(None, 4))


class Keeps(nn.Module):
    """Keeps numbers in objects, in an array and in a generator that its first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sums = Counter[str](), np.zeros(3)
        self.record = SimpleNamespace(last=torch.zeros(3, dtype=DOUBLE))
        self.random = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "noise"):
            self.noise = torch.Generator().manual_seed(1)
        self.calls["all"] += 1
        self.sums += x.detach().sum(0).numpy()
        self.record.last = self.record.last * 0.5 + x.detach().mean(0)
        noise = torch.rand(x.shape, dtype=x.dtype, generator=self.noise) * self.random.random()
        return x * self.calls["all"] + noise + torch.from_numpy(self.sums.copy()) + self.record.last


@each_way
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_layers_keep_in_objects_and_arrays(phase: str, inline: bool):
    """Also in the steps that follow, with an optimizer."""

    def trained(limit: int | None, chunks: int) -> Any:
        found, limited = [], Limited(limit, phase)
        layers = nn.Sequential(*linears(1), Keeps(), *linears(1), limited)
        with closing(piped(layers, [2, 2], chunks=chunks, checkpoint="never")) as pipe, running(inline):
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9)
            for _ in range(3):
                loss = pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, on_oom="smaller chunks")
                found.append((loss, gradients(pipe)))
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert_equal(trained(2, 2), trained(None, 4))


def test_what_a_forward_changes_for_good_is_named():
    class Drifts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    with closing(piped(nn.Sequential(Drifts(3, 3, dtype=DOUBLE), Limited(2)), [1, 1], chunks=2)) as pipe:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, on_oom="smaller chunks")
        assert "'weight' of Drifts" in caught.value.__notes__[-1]

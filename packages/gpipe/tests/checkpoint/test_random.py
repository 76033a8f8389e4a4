"""Random numbers depend on the seed alone, and a recomputation draws what its forward drew."""

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from packages.streams.tests.fakes import in_child
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe, inline
from gpipe.checkpoint._random import PROCESS, CellRNG, RunRNG, get_generator_state

from ..layers import MODES, Call, Layer, each_mode, linears, piped, rows, running, squares, trained
from ..models import Recipe, assert_close, recipes
from ..module.test_step import SLOW, Way, lived, ways


def checkpointed(use_reentrant: bool, p: float = 0.0) -> nn.Module:
    """Return a layer with a nested checkpoint."""
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(p) if p else nn.Identity(), nn.Tanh())
    return Layer(lambda s, x: checkpoint(s.m[0], x, use_reentrant=use_reentrant), inner)


@SLOW
@given(recipes(), ways, ways, st.integers(0, 2**16), st.integers(1, 4), st.sampled_from(MODES), st.booleans())
def test_random_numbers_depend_only_on_cell(
    recipe: Recipe, one: Way, other: Way, seed: int, stages: int, mode: str, random: bool
):
    """They do not depend on balance, number of partitions, checkpointing, schedule or threads, even in the loss."""
    recipe = replace(recipe, training=True, input_needs_grad=True, dtype=torch.float64)
    loss = "random" if random and "call" not in (one.schedule, other.schedule) else one.loss
    expected = lived(recipe, replace(one, loss=loss))
    moved = replace(recipe, balance_seed=seed, stages=stages, checkpoint=mode)
    assert_close(lived(moved, replace(other, loss=loss)), expected, recipe)


@settings(max_examples=max(2, settings.default.max_examples // 10))
@given(st.integers(1, 64), st.integers(1, 64))
def test_cells_have_different_seeds(microbatches: int, layers: int):
    run = RunRNG()
    cells = [CellRNG(run, i, k) for i in range(microbatches) for k in range(layers)]
    seeds = {cell.draw().initial_seed() for cell in cells}
    for cell in cells:
        cell.at = 0
        seeds.add(cell.draw().initial_seed())
    assert len(seeds) == 2 * len(cells)


def drawn(s: Layer, x: Tensor) -> Tensor:
    """Use random numbers from several private generators, sometimes reseeded, or all with the same seed."""
    for which, how in s.plan:
        generator = s.generators[which]
        if how == "seeded":
            generator.manual_seed(5)
        elif how == "new":
            generator = torch.Generator().manual_seed(3)
        x = x * torch.rand(x.shape, generator=generator)
    return x


def drawing(plan: list[tuple[int, str]]) -> nn.Sequential:
    generators = [[torch.Generator().manual_seed(0) for _ in range(2)] for _ in range(2)]
    return nn.Sequential(*(Layer(drawn, plan=plan, generators=own) for own in generators))


@given(
    plan=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["drawn", "drawn", "seeded", "new"])), max_size=5),
    mode=st.sampled_from(MODES),
    inline=st.booleans(),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_generators_of_layers(plan: list[tuple[int, str]], mode: str, inline: bool):
    torch.manual_seed(0)  # the same seed as the layers' generators, so that they could be confused
    pipe = GPipe(drawing(plan), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    plain = drawing(plan)
    with running(inline):
        for _ in range(2):
            x = torch.ones(6, 5, requires_grad=True)
            output = pipe(x)
            output.sum().backward()
            torch.testing.assert_close(x.grad, output)
            assert torch.equal(output, torch.cat([plain(chunk) for chunk in torch.ones(6, 5).chunk(3)]))
    pipe.close()


def seeded(seed: int) -> Callable[[Tensor], Tensor]:
    """Return a function with the same noise in each forward, like a layer that repeats another layer's noise."""

    def call(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return x * torch.rand(x.shape)

    return call


def restored(x: Tensor) -> Tensor:
    """Restore a state of torch's generator from a different seed."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(3).get_state())
        return nn.functional.dropout(x)


class Reversed(torch.autograd.Function):
    """Computes its forward again in the backward, as reversible layers do, with the numbers that it drew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        return x * torch.rand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            return gradient * torch.rand(gradient.shape)


def noisy(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda gradient: gradient + torch.rand(gradient.shape))
    return y


IN_BACKWARD = "drawn on the CPU in a backward"
SEEDED = "after torch's generator was given another seed"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "checkpoint": (lambda: checkpointed(False, 0.5), IN_BACKWARD),
    "reentrant checkpoint": (lambda: checkpointed(True, 0.5), IN_BACKWARD),
    "reversible": (lambda: Call(Reversed.apply), IN_BACKWARD),
    "noise on gradients": (lambda: Call(noisy), IN_BACKWARD),
    "seed": (lambda: Call(seeded(17)), SEEDED),
    "the seed of the process": (lambda: Call(seeded(5)), SEEDED),
    "state": (lambda: Call(restored), SEEDED),
    "pipe in a checkpoint": (
        lambda: Call(lambda x: checkpoint(GPipe(nn.Sequential(nn.Dropout()), [1], devices=["cpu"]), x,
                                          use_reentrant=True)),
        IN_BACKWARD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
@each_mode
@pytest.mark.parametrize("inline", [False, True])
def test_repeating_random_numbers_raises(name: str, mode: str, inline: bool):
    """It raises in every run and schedule, and the global generator does not show that the layers used it."""
    make, says = REFUSED[name]
    pipe = GPipe(
        nn.Sequential(nn.Linear(6, 6), make(), nn.Dropout()), [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode
    )
    with running(inline):
        for schedule in (None, "1f1b", "fill_drain", "zero_bubble"):
            torch.manual_seed(5)
            torch.rand(3)
            with pytest.raises(RuntimeError, match=says) as caught:
                trained(pipe, torch.ones(4, 6, requires_grad=True) * 1, schedule)
            assert any("micro-batch" in note for note in caught.value.__notes__)
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
def test_loss_repeating_random_numbers_raises(schedule: str):
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6)), [1], devices=["cpu"], chunks=2)
    for make, says in REFUSED.values():
        loss = nn.Sequential(make(), Call(torch.sum))
        torch.manual_seed(5)
        torch.rand(3)
        with pytest.raises(RuntimeError, match=rf"{says}|loss_fn uses torch.utils.checkpoint"):
            pipe.step(torch.ones(4, 6), loss_fn=loss, reduction="sum", schedule=schedule)


@each_mode
def test_layer_may_seed_generator_after_last_use(mode: str):
    """The new seed applies to code after the run. It is not a state restored too late."""
    layers = nn.Sequential(nn.Dropout(), Call(lambda x: (torch.manual_seed(17), x * 1)[1]))
    pipe = GPipe(layers, [1, 1], devices=["cpu"] * 2, checkpoint=mode)
    torch.manual_seed(5)
    pipe(torch.ones(4, 6))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(17).get_state())


@each_mode
def test_nested_pipe_uses_random_numbers_of_layer(mode: str):
    """Recomputation repeats them, since gradients use tensors saved by the forward."""
    inside = GPipe(nn.Sequential(nn.Dropout()), [1], devices=["cpu"], chunks=2)
    pipe = GPipe(nn.Sequential(nn.Identity(), inside), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    x = torch.ones(8, 6, requires_grad=True)
    y = pipe(x)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert {*y.flatten().tolist()} == {0.0, 2.0}


def test_generator_lock_is_free_during_garbage_collection() -> None:
    """Other threads may wait for the lock, and block the collection forever."""
    assert in_child(_states_in_collections) == "True"


def _states_in_collections() -> bool:
    """Return whether garbage was collected while states were read, with the lock free."""
    during, reads, held = [], [False], []

    def note(*_: Any) -> None:
        if reads[0]:
            during.append(PROCESS.get_state())  # waits forever for a lock that this thread holds

    gc.set_threshold(10)
    gc.callbacks.append(note)
    for k in range(500):
        for _ in range(1 + (k % 7 == 0)):  # so that collections begin at any allocation
            held.append([])
        reads[0] = True
        held.append(get_generator_state(PROCESS))
        reads[0] = False
    return bool(during) or sys.version_info >= (3, 12)


@pytest.mark.parametrize("is_collecting", [True, False])
@pytest.mark.parametrize("way", [nullcontext, inline])
def test_garbage_collector_setting_is_preserved(
    monkeypatch: pytest.MonkeyPatch, is_collecting: bool, way: Callable[[], Any]
) -> None:
    """Switching the collector in one thread affects all threads."""
    switched: list[str] = []
    (gc.enable if is_collecting else gc.disable)()
    try:
        with monkeypatch.context() as patch, way():
            for name in ("enable", "disable"):
                patch.setattr(gc, name, lambda name=name: switched.append(name))
            pipe = piped(nn.Sequential(nn.Dropout(), *linears(1), nn.Dropout()), [1, 2], chunks=2)
            pipe.step(rows(), loss_fn=lambda output: output.square().mean(), reduction="mean")
            pipe(rows()).sum().backward()
        assert gc.isenabled() == is_collecting
    finally:
        gc.enable()
    assert not switched


RACING = {
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "dropout": nn.Dropout,
    "forks": lambda: Call(lambda x: (_forks(), x * 1)[1]),
}


def _forks() -> None:
    with torch.random.fork_rng(devices=[]):
        pass


@pytest.mark.usefixtures("no_collector")  # see get_generator_state(); layers read the state from torch themselves
@settings(max_examples=settings.default.max_examples // 3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(sorted(RACING)), min_size=2, max_size=4),
    st.sampled_from(MODES),
    st.sampled_from([None, "1f1b", "zero_bubble"]),
)
@example(["checkpoint", "dropout", "checkpoint", "dropout"], "never", "1f1b")
@example(["checkpoint", "dropout", "reentrant checkpoint", "dropout"], "always", None)
def test_layers_that_touch_the_generator_race_for_nothing(names: list[str], mode: str, schedule: str | None):
    """They read, set and put back its state on several threads while others draw."""

    def raced(inline: bool) -> list[Any]:
        torch.manual_seed(7)
        model = nn.Sequential(*(RACING[name]() for name in names))
        pipe = GPipe(model, [1] * len(names), devices=["cpu"] * len(names), chunks=4, checkpoint=mode)
        found: list[Any] = []
        with running(inline):
            for _ in range(4):
                pipe.zero_grad()
                x = torch.ones(8, 6, requires_grad=True)
                if schedule is None:
                    loss = pipe(x * 1).square().sum()
                    torch.rand(3)  # by the caller, between forward and backward
                    loss.backward()
                else:
                    loss = pipe.step(x * 1, loss_fn=squares, reduction="mean", schedule=schedule)
                found += [loss.detach(), x.grad, torch.get_rng_state(), *[p.grad for p in pipe.parameters()]]
        pipe.close()
        return found

    torch.testing.assert_close(raced(False), raced(True), rtol=1e-5, atol=1e-6)

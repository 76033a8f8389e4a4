"""Random numbers depend on the seed alone, and a recomputation draws what its forward drew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe import GPipe
from gpipe.checkpoint._random import OUTSIDE, CellRNG, RunRNG

from .layers import Call
from .models import Recipe, main_of, recipes
from .schedules import CHOICES, some_schedule

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("never", "except_last", "always")
CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Checkpointed(nn.Module):
    """Has a checkpoint of its own inside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Tanh())
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Draws(nn.Module):
    """Draws in every way that torch offers, in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) + torch.rand(x.shape) + torch.randn(x.shape).exp()
        noise = noise + torch.randint(3, x.shape) + torch.empty_like(x).uniform_() + torch.empty_like(x).exponential_()
        chosen = torch.multinomial(torch.ones(6), 6)
        return (x * noise)[..., torch.randperm(6)][..., chosen] * torch.bernoulli(torch.full(x.shape, 0.7))


LAYERS = {
    "dropout": nn.Dropout,
    "dropout in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(inplace=True)),
    "feature dropout": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Dropout2d(), nn.Flatten(1, 2)),
    "alpha dropout": nn.AlphaDropout,
    "random relu": nn.RReLU,
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True),
    "lstm": Recurrent,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "gumbel": lambda: Call(lambda x: nn.functional.gumbel_softmax(x, hard=True)),
    "everything": Draws,
}


def lived(names: tuple[str, ...], mode: str, inline: bool, seed: int = 0, steps: int = 2) -> list[Any]:
    """Outputs and gradients of some steps of a pipe with a layer on each stage."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), *(LAYERS[name]() for name in names))
    pipe = GPipe(model, [2, *[1] * (len(names) - 1)], devices=["cpu"] * len(names), chunks=3, checkpoint=mode)
    x = torch.randn(6, 4, 6)
    torch.manual_seed(seed)
    results: list[Any] = []
    with gpipe.inline() if inline else nullcontext():
        for _ in range(steps):
            pipe.zero_grad()
            leaf = x.clone().requires_grad_()
            output = pipe(leaf)
            output.square().sum().backward()
            results += [output.detach(), leaf.grad, *[p.grad for p in pipe.parameters()]]
    pipe.close()
    return results


@settings(max_examples=settings.default.max_examples // 10)
@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3).map(tuple), st.integers(0, 2**40))
def test_result_depends_on_the_seed_alone(names: tuple[str, ...], seed: int):
    first, *others = (lived(names, mode, inline, seed) for mode in MODES for inline in (True, False))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@dataclass(frozen=True)
class Way:
    """How a model is computed; printed where a property fails."""

    balance_seed: int
    stages: int
    checkpoint: str
    inline: bool
    schedule: Any

    def trained(self, recipe: Recipe, loss_fn: Callable[[Any, Any], Tensor]) -> list[Any]:
        """What two training steps from one seed leave behind."""
        recipe = replace(recipe, balance_seed=self.balance_seed, stages=self.stages)
        model, results = recipe.model(), []
        balance = recipe.balance(len(model))
        pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=recipe.chunks, checkpoint=self.checkpoint)
        torch.manual_seed(recipe.seed)
        with gpipe.inline() if self.inline else nullcontext():
            for x in recipe.batches():
                pipe.zero_grad()
                leaf = x.clone().requires_grad_()
                loss, output = pipe.step(
                    leaf * 1,
                    x,
                    loss_fn=loss_fn,
                    reduction="sum",
                    schedule=self._schedule(-(-len(x) // -(-len(x) // recipe.chunks)), len(balance)),
                    return_outputs=True,
                )
                results += [loss, main_of(output), leaf.grad, *[p.grad for p in pipe.parameters()]]
        pipe.close()
        return results

    def _schedule(self, microbatches: int, stages: int) -> Any:
        if isinstance(self.schedule, str):
            return self.schedule
        stop = {"never": 0, "except_last": microbatches - 1, "always": microbatches}[self.checkpoint]
        placement = (0,) * stages if self.inline else range(stages)
        return some_schedule(self.schedule, microbatches, placement, stop, in_order=True)


WAYS = st.builds(
    Way,
    balance_seed=st.integers(0, 2**16),
    stages=st.integers(1, 4),
    checkpoint=st.sampled_from(MODES),
    inline=st.booleans(),
    schedule=st.sampled_from(["fill_drain", "1f1b", "interleaved", "zero_bubble"]) | CHOICES,
)
LOSSES = {
    "plain": lambda output, target: main_of(output).square().sum(),
    "random": lambda output, target: nn.functional.dropout(main_of(output), 0.3).square().sum(),
}


@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@given(recipes(), WAYS, WAYS, st.sampled_from(sorted(LOSSES)))
def test_numbers_depend_on_layer_and_micro_batch_alone(recipe: Recipe, one: Way, other: Way, loss: str):
    """And not on the balance, the number of partitions, checkpointing, the schedule or threads."""
    recipe = replace(recipe, training=True, dtype=torch.float64, frozen=frozenset(), deferred=False)
    layers = (*recipe.layers, ("tensor", "linear"))  # so that there is something to train
    recipe = replace(recipe, layers=layers)
    results = [way.trained(recipe, LOSSES[loss]) for way in (one, other)]
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.parametrize("inline", [False, True])
def test_a_run_on_two_partitions_can_be_repeated_on_one_or_four(name: str, inline: bool):
    """Forwards and backwards, with layers that do not draw around the one that does."""
    results = []
    for balance in ([2, 2], [1, 1, 1, 1], [4], [3, 1], [1, 3]):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 6), LAYERS[name](), nn.Linear(6, 6), nn.Dropout()).double()
        pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=MODES[len(balance) % 3])
        x = torch.randn(6, 4, 6, dtype=torch.float64)
        results.append([])
        torch.manual_seed(0)
        with gpipe.inline() if inline else nullcontext():
            for _ in range(2):  # all layers are watched, and then those that draw
                pipe.zero_grad()
                leaf = x.clone().requires_grad_()
                output = pipe(leaf * 1)
                output.square().sum().backward()
                results[-1] += [output.detach(), leaf.grad, *[p.grad for p in pipe.parameters()]]
        pipe.close()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"gumbel"}))  # whose gradient is not the slope, by design
@pytest.mark.parametrize("mode", MODES)
def test_gradient_belongs_to_what_was_drawn(name: str, mode: str):
    """Against finite differences under the same seed, which no disagreement between forward and backward survives."""
    torch.manual_seed(7)
    model = nn.Sequential(LAYERS[name](), nn.Tanh()).double()
    pipe = GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint=mode)
    x = torch.randn(4, 4, 6, dtype=torch.float64)
    direction = torch.randn_like(x)
    pipe(x.clone().requires_grad_())  # from here on it is known who draws

    def loss(at: Tensor) -> Tensor:
        torch.manual_seed(3)
        return pipe(at * 1).sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    h = 1e-6
    ends = [(x + sign * h * direction).requires_grad_() for sign in (1, -1)]
    slope = float((loss(ends[0]) - loss(ends[1])).detach()) / (2 * h)
    assert float((leaf.grad * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_other_seed_other_numbers():
    a, b = lived(("dropout",), "never", False, seed=1), lived(("dropout",), "never", False, seed=2)
    assert not torch.equal(a[0], b[0])


def test_every_cell_and_every_step_draws_its_own():
    pipe = GPipe(nn.Sequential(nn.Dropout(), nn.Dropout()), [1, 1], devices=["cpu"] * 2, chunks=4)
    rows = torch.cat([pipe(torch.ones(4, 64)) for _ in range(3)])
    assert len({tuple(row.tolist()) for row in rows}) == 12


@settings(max_examples=settings.default.max_examples // 10)
@given(st.integers(1, 64), st.integers(1, 64))
def test_no_two_layers_or_micro_batches_share_a_seed(microbatches: int, layers: int):
    run = RunRNG()
    cells = [CellRNG(run, i, k, CPU, {0}) for i in range(microbatches) for k in range(layers)]
    seeds = {cell.generator.initial_seed() for cell in cells}
    for cell in cells:
        with cell.layer(0):
            seeds.add(cell.generator.initial_seed())
    assert len(seeds) == 2 * len(cells)


def test_run_takes_one_number_from_the_process_and_only_if_something_draws():
    quiet = GPipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5).eval()), [1, 1], devices=["cpu"] * 2, chunks=3)
    loud = GPipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), [1, 1], devices=["cpu"] * 2, chunks=3)
    for pipe, training, taken in ((quiet, True, 0), (loud, True, 1), (loud, False, 0)):
        pipe[1].train(training and pipe is loud)
        for _ in range(2):
            torch.manual_seed(5)
            before = torch.get_rng_state()
            pipe(torch.randn(6, 6, generator=torch.Generator())).sum().backward()
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            for _ in range(taken):
                torch.randint(2**32, ())
            assert torch.equal(torch.get_rng_state(), after)


def test_evaluation_is_as_without_a_pipe():
    model = nn.Sequential(nn.Dropout(), nn.Linear(6, 6)).eval()
    pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2)
    x = torch.randn(4, 6)
    assert torch.equal(pipe(x), model(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inline", [False, True])
def test_layer_that_starts_to_draw(mode: str, inline: bool):
    """As a drop path whose rate grows from zero does."""
    layer = Call(lambda x: nn.functional.dropout(x, rates[0]) if rates[0] else x * 1)
    pipe = GPipe(nn.Sequential(nn.Identity(), layer), [1, 1], devices=["cpu"] * 2, chunks=4, checkpoint=mode)
    x = torch.ones(8, 16, requires_grad=True)
    rates = [0.0]
    with gpipe.inline() if inline else nullcontext():
        for rates[0] in (0.0, 0.0, 0.5, 0.5, 0.5):
            x.grad = None
            output = pipe(x)
            output.sum().backward()
            assert torch.equal(x.grad, output)


def test_dropout_that_leaves_evaluation_by_itself():
    """The stage's own flag stays; only a layer in it goes from evaluation to training."""
    pipe = GPipe(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never"
    )
    pipe[1].eval()
    x = torch.ones(4, 8)
    pipe(x)
    pipe[1].train()
    pipe(x)  # whatever this one drew, from here on numbers are watched
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(pipe(x))
    assert torch.equal(*outputs)


class OwnNoise(nn.Module):
    """Has generators of its own, and draws from them, perhaps again and again in a forward."""

    def __init__(self, draws: list[int]) -> None:
        super().__init__()
        self.draws = draws
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        self.first = self.generators[0]  # where it shows, so that it is watched from the beginning

    def forward(self, x: Tensor) -> Tensor:
        for which in self.draws:
            x = x * torch.rand(x.shape, generator=self.generators[which])
        return x


@settings(max_examples=settings.default.max_examples // 5)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.sampled_from(MODES), st.booleans())
@example([0], "always", False)
@example([0, 0], "always", True)
@example([0, 1, 0], "except_last", False)
def test_generators_of_a_layer_of_its_own(draws: list[int], mode: str, inline: bool):
    layer, plain = OwnNoise(draws), OwnNoise(draws)
    pipe = GPipe(nn.Sequential(nn.Identity(), layer), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    with gpipe.inline() if inline else nullcontext():
        for _ in range(3):
            x = torch.ones(6, 5, requires_grad=True)
            output = pipe(x)
            output.sum().backward()
            torch.testing.assert_close(x.grad, output)
            torch.testing.assert_close(output, torch.cat([plain(chunk) for chunk in torch.ones(6, 5).chunk(3)]))
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inline", [False, True])
def test_generator_of_the_process_by_name(mode: str, inline: bool):
    layers = [Call(lambda x: x * torch.rand(x.shape, generator=torch.default_generator)) for _ in range(2)]
    pipe = GPipe(nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    outputs = []
    with gpipe.inline() if inline else nullcontext():
        for _ in range(3):
            torch.manual_seed(1)
            x = torch.ones(6, 5, requires_grad=True)
            outputs.append(pipe(x))
            outputs[-1].sum().backward()
            assert torch.equal(x.grad, outputs[-1])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


class Drawn(nn.Module):
    """Draws several times from generators of its own, now and then seeded anew, or all with one seed."""

    def __init__(self, plan: list[tuple[int, str]]) -> None:
        super().__init__()
        self.plan = plan
        self.generators = [torch.Generator().manual_seed(0) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for which, how in self.plan:
            generator = self.generators[which]
            if how == "seeded":
                generator.manual_seed(5)
            elif how == "new":
                generator = torch.Generator().manual_seed(3)
            x = x * torch.rand(x.shape, generator=generator)
        return x


@given(
    plan=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["drawn", "drawn", "seeded", "new"])), max_size=5),
    mode=st.sampled_from(MODES),
    inline=st.booleans(),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_generators_of_layers(plan: list[tuple[int, str]], mode: str, inline: bool):
    torch.manual_seed(0)  # as theirs, so that nobody mistakes one for the other
    pipe = GPipe(nn.Sequential(Drawn(plan), Drawn(plan)), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    plain = nn.Sequential(Drawn(plan), Drawn(plan))
    with gpipe.inline() if inline else nullcontext():
        for _ in range(2):
            x = torch.ones(6, 5, requires_grad=True)
            output = pipe(x)
            output.sum().backward()
            torch.testing.assert_close(x.grad, output)
            assert torch.equal(output, torch.cat([plain(chunk) for chunk in torch.ones(6, 5).chunk(3)]))
    pipe.close()


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("inline", [False, True])
def test_pipe_in_a_pipe(outer: str, inner: str, inline: bool):
    layers = nn.Sequential(nn.Dropout(), nn.Identity())
    nested = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=inner)
    pipe = GPipe(nn.Sequential(nested, nn.Dropout()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=outer)
    with gpipe.inline() if inline else nullcontext():
        outputs = []
        for _ in range(3):
            torch.manual_seed(1)
            x = torch.ones(8, 8, requires_grad=True)
            output = pipe(x)
            output.sum().backward()
            assert torch.equal(x.grad, output)
            outputs.append(output)
        assert torch.equal(outputs[1], outputs[2])


def test_state_read_and_set_inside_a_layer_is_the_layers():
    """What torch.utils.checkpoint does, and libraries that fork the generator."""

    def twice(x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = torch.rand(x.shape)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(x.shape), first)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
        return x * first

    pipe = GPipe(nn.Sequential(Call(twice), Call(twice)), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    for _ in range(3):
        torch.manual_seed(2)
        before = torch.get_rng_state()
        x = torch.ones(4, 4, requires_grad=True)
        output = pipe(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad, output)
        torch.set_rng_state(before)
        torch.randint(2**32, ())


SERVED = {"checkpoint", "reentrant checkpoint"}


@pytest.mark.parametrize("name", sorted({*LAYERS} - SERVED))
@pytest.mark.parametrize("mode", MODES)
def test_numbers_of_a_cell_never_are_in_the_process_s_generator(name: str, mode: str, monkeypatch: pytest.MonkeyPatch):
    """Where another thread might draw them, and which one operation at a time could use."""
    monkeypatch.setattr("gpipe.checkpoint._random.lent", lambda *_: pytest.fail("a generator was lent"))
    lived((name, name), mode, inline=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, None, False])
@pytest.mark.parametrize("shape", [(5, 7), (0, 3)])
def test_fused_dropout_is_that_of_torch(shape: tuple[int, ...], train: bool | None, p: float, dtype: torch.dtype):
    """In a cell, and with the same numbers outside of one."""
    x = torch.randn(shape).to(dtype).requires_grad_()
    results = []
    for inside in (True, False):
        generator = torch.manual_seed(5)
        cell = CellRNG(RunRNG(), 0, 0, CPU, [OUTSIDE])
        cell._generators[OUTSIDE] = generator.clone_state()
        with cell.drawn_from(served=False) if inside else nullcontext():
            output, mask = torch.native_dropout(x, p, train)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        results.append((output.detach(), mask, gradient))
        assert not inside or bool(cell.drew) == (train is not False and x.numel() > 0)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


def test_attention_that_drops_nothing_draws_nothing():
    x = torch.randn(2, 4, 8, 6)
    cell = CellRNG(RunRNG(), 0, 0, CPU, [OUTSIDE])
    with cell.drawn_from(served=False):
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert not cell.drew


def test_draws_of_another_thread_do_no_harm():
    """A data loader's thread draws while the pipe runs: no gradient changes, nothing is refused."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    pipe(torch.ones(4, 4))
    entered, drawn = threading.Event(), threading.Event()

    def load() -> None:
        entered.wait(10)
        torch.rand(3)
        drawn.set()

    def wait(x: Tensor) -> Tensor:
        entered.set()
        assert drawn.wait(10)
        return x

    pipe[1].register_forward_hook(lambda _, args, output: wait(output))
    thread = threading.Thread(target=load)
    thread.start()
    pipe(torch.ones(4, 4)).sum().backward()
    thread.join()
    assert pipe[0].weight.grad is not None

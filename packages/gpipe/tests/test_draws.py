"""It is learned which layers draw, and only these pay for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import GPipe
from gpipe.checkpoint import _random
from gpipe.checkpoint._random import OUTSIDE, CellRNG, RunRNG
from gpipe.engine._draws import Draws

from .layers import Call

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]

MODES = ("never", "except_last", "always")
each_way = pytest.mark.parametrize(("mode", "inline"), [(mode, inline) for mode in MODES for inline in (False, True)])


def way(inline: bool) -> Any:
    return gpipe.inline() if inline else nullcontext()


class Followed(nn.Module):
    """Notes whether its draws are followed."""

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.draws = draws
        self.notes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        rng = _random.current.rng
        self.notes.append(rng is not None and rng.follows)
        return x * torch.rand(()) if self.draws else x * 1


def pipe_of(*layers: nn.Module, balance: list[int], mode: str = "never", chunks: int = 3) -> GPipe:
    return GPipe(nn.Sequential(*layers), balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=mode)


def ones() -> Tensor:
    return torch.ones(6, 8, requires_grad=True)


@settings(max_examples=settings.default.max_examples // 5)
@given(
    st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from(MODES), st.booleans(), st.data()
)
def test_only_layers_that_draw_are_followed(draws: list[bool], stages: int, mode: str, inline: bool, data: Any):
    """After the first run in each training mode, wherever they are."""
    layers = [Followed(each) for each in draws]
    stages = min(stages, len(layers))
    cuts = sorted(data.draw(st.permutations(range(1, len(layers))))[: stages - 1])
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    pipe = pipe_of(*layers, balance=balance, mode=mode)
    with way(inline):
        for training in (True, False):
            pipe.train(training)
            for run in range(3):
                for layer in layers:
                    layer.notes.clear()
                pipe(ones()).sum().backward()
                for layer in layers:
                    assert set(layer.notes) == {run == 0 or layer.draws}
    pipe.close()


@each_way
def test_a_layer_that_is_switched_alone(mode: str, inline: bool):
    """The flag of each layer counts, and not only that of the pipe."""
    pipe = pipe_of(nn.Linear(8, 8), nn.Dropout(), balance=[2], mode=mode)
    outputs = []
    with way(inline):
        pipe[1].eval()
        pipe(ones())
        pipe[1].train()
        for _ in range(2):
            torch.manual_seed(1)
            outputs.append(pipe(ones()))
    assert torch.equal(*outputs)


@each_way
def test_hooks_of_a_partition_have_numbers_of_their_own(mode: str, inline: bool):
    results = []
    for _ in range(2):
        pipe = pipe_of(nn.Identity(), nn.Dropout(), balance=[1, 1], mode=mode)
        for partition in pipe.partitions:
            partition.register_forward_pre_hook(lambda _, args: (args[0] * torch.rand(args[0].shape),))
            partition.register_forward_hook(lambda _, args, output: output * torch.rand(output.shape))
        torch.manual_seed(0)
        with way(inline):
            for _ in range(3):
                x = ones()
                output = pipe(x)
                output.sum().backward()
                torch.testing.assert_close(x.grad, output)
                results.append(output.detach())
    assert torch.equal(torch.stack(results[:3]), torch.stack(results[3:]))
    assert len({float(result.sum()) for result in results}) == 3


@pytest.mark.parametrize("inline", [False, True])
def test_a_layer_that_replaces_another_is_looked_at(inline: bool):
    layer = Followed(draws=True)
    pipe = pipe_of(nn.Identity(), nn.Identity(), balance=[1, 1])
    with way(inline):
        pipe(ones())
        pipe.partitions[1][0] = layer
        torch.manual_seed(0)
        first = pipe(ones())
        torch.manual_seed(0)
        assert torch.equal(pipe(ones()), first)
    assert all(layer.notes)


@pytest.mark.parametrize("inline", [False, True])
def test_a_loss_that_draws_is_followed_and_another_one_is_not(inline: bool):
    pipe = pipe_of(nn.Linear(8, 8), balance=[1])
    quiet, loud = Followed(), Followed(draws=True)
    with way(inline):
        for run in range(3):
            for layer in (quiet, loud):
                layer.notes.clear()
            pipe.step(ones(), loss_fn=lambda output, _: quiet(output).sum())
            pipe.step(ones(), loss_fn=lambda output, _: loud(output).sum())
            assert set(quiet.notes) == {run == 0}
            assert set(loud.notes) == {True}


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain", "zero_bubble"])
@pytest.mark.parametrize("inline", [False, True])
def test_a_loss_draws_the_same_from_one_seed(schedule: str, inline: bool):
    """And what it takes from the process's generator is what layers take: one number."""
    losses = []
    for balance in ([2, 1], [3], [1, 1, 1]):
        torch.manual_seed(7)
        pipe = pipe_of(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), balance=balance)
        torch.manual_seed(0)
        with way(inline):
            for _ in range(3):
                losses.append(
                    pipe.step(ones(), loss_fn=lambda y, _: nn.functional.dropout(y).square().sum(), schedule=schedule)
                )
        after = torch.get_rng_state()
        torch.manual_seed(0)
        for _ in range(3):
            torch.randint(2**32, ())
        assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:6]))
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[6:]))
    assert len(set(map(float, losses))) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inline", [False, True])
def test_a_pipe_in_a_layer_draws_the_same_wherever_the_layer_is(mode: str, inline: bool):
    results = []
    for balance, inner in (([2, 2], [1, 1]), ([4], [2]), ([1, 2, 1], [2])):
        nested = pipe_of(nn.Dropout(), nn.Dropout(), balance=inner, mode=mode, chunks=2)
        pipe = pipe_of(nn.Identity(), nn.Dropout(), nested, nn.Identity(), balance=balance, mode=mode)
        torch.manual_seed(0)
        with way(inline):
            for _ in range(3):
                x = ones()
                output = pipe(x)
                output.sum().backward()
                assert torch.equal(x.grad, output)
                results.append(output.detach())
    first = torch.stack(results[:3])
    assert torch.equal(torch.stack(results[3:6]), first)
    assert torch.equal(torch.stack(results[6:]), first)


@each_way
def test_a_backward_that_draws_adds_what_it_drew(mode: str, inline: bool):
    """Noise on gradients comes from the process's generator. Nothing is refused, and no mask changes."""

    def noisy(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda gradient: gradient + torch.rand(gradient.shape))
        return y

    pipe = pipe_of(nn.Dropout(), Call(noisy), nn.Dropout(), balance=[2, 1], mode=mode)
    with way(inline):
        for _ in range(3):
            x = ones()
            output = pipe(x)
            output.sum().backward()
            kept = output.detach() != 0
            assert (x.grad[kept] >= output[kept]).all()
            assert (x.grad[kept] <= output[kept] + 2).all()
            pipe.step(ones(), loss_fn=lambda y, _: y.sum())


def test_two_pipes_take_a_number_each():
    a, b = (pipe_of(nn.Dropout(), nn.Identity(), balance=[1, 1]) for _ in range(2))
    torch.manual_seed(0)
    outputs = [a(ones()), b(ones()), a(ones())]
    torch.manual_seed(0)
    again = [b(ones()), a(ones()), b(ones())]
    assert torch.equal(torch.stack(outputs), torch.stack(again))
    assert not torch.equal(outputs[0], outputs[1])


@each_way
def test_a_layer_that_draws_in_some_runs_only(mode: str, inline: bool):
    """Once it was noticed, and caught at it within a few runs, it draws from its own numbers whenever it does."""
    layer = Followed()
    pipe = pipe_of(nn.Linear(8, 8), layer, nn.Linear(8, 8), balance=[2, 1], mode=mode)
    outputs = []
    with way(inline):
        for run in range(16):
            layer.draws = run % 5 == 4
            torch.manual_seed(0)
            torch.randint(2**32, ())
            after = torch.get_rng_state()
            torch.manual_seed(0)
            outputs.append(pipe(ones()))
            outputs[-1].sum().backward()
            if layer.draws and run > 4:
                assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(outputs[9], outputs[14])


class TestDraws:
    """What is known, without a pipe."""

    EVERYONE = frozenset([OUTSIDE, 0, 1])

    def run(self, draws: Draws, condition: str, *drew: int) -> None:
        draws.begin(condition)
        self.forward(draws, *drew)
        draws.saw_all()

    def forward(self, draws: Draws, *drew: int) -> None:
        random = CellRNG(RunRNG(), 0, 0, torch.device("cpu"), draws.drawing)
        with draws.learning(random):
            random.drew.update(drew)

    def test_everyone_may_draw_until_a_whole_run_was_watched(self):
        draws = Draws(self.EVERYONE)
        draws.begin("a")
        self.forward(draws)
        assert draws.drawing == self.EVERYONE
        self.forward(draws, 1)
        draws.saw_all()
        draws.begin("a")
        assert draws.drawing == {1}

    def test_each_condition_is_learned_by_itself(self):
        draws = Draws(self.EVERYONE)
        self.run(draws, "a", 0)
        draws.begin("b")
        assert draws.drawing == self.EVERYONE

    def test_who_drew_once_may_do_it_again(self):
        draws = Draws(self.EVERYONE)
        self.run(draws, "a", 0)
        draws.forget()
        assert draws.drawing == self.EVERYONE
        self.run(draws, "a", 1)
        draws.begin("a")
        assert draws.drawing == {0, 1}

    def test_who_drew_unseen_is_looked_for_in_several_runs(self):
        draws = Draws(self.EVERYONE)
        self.run(draws, "a", 0)
        draws.forget()
        self.run(draws, "a")
        self.run(draws, "a", 0)
        assert draws.drawing == self.EVERYONE
        self.run(draws, "a", 1)
        draws.begin("a")
        assert draws.drawing == {0, 1}

    def test_the_search_for_who_drew_unseen_ends(self):
        draws = Draws(self.EVERYONE)
        self.run(draws, "a", 0)
        draws.forget()
        for _ in range(100):
            self.run(draws, "a", 0)
        draws.begin("a")
        assert draws.drawing == {0}

    def test_a_run_that_was_half_watched_says_nothing(self):
        draws = Draws(self.EVERYONE)
        draws.begin("a")
        draws.forget()
        self.forward(draws)
        draws.saw_all()
        draws.begin("a")
        assert draws.drawing == self.EVERYONE

    def test_some_are_always_followed(self):
        draws = Draws(self.EVERYONE)
        draws.begin("a")
        self.forward(draws)
        draws.saw_all(lambda: frozenset([1]))
        draws.begin("a")
        assert draws.drawing == {1}

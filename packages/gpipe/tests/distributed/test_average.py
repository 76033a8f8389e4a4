"""Averages over replicas: two pipes, each with half of the rows, train like one model with all of them."""

import signal
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe.distributed._average as average
from gpipe import GPipe
from gpipe.distributed import LostRankError, Rank, average_gradients

from ..layers import Layer, Tied
from .planted import Planted, expect_gradients, mesh_of_four, own_half
from .test_object_exchange import expect_named

SHAPES = [(3, 2), (), (5,), (2, 2), (4, 3)]
DTYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32]
kinds = st.lists(st.sampled_from(["none", "dense", "sparse"]), min_size=len(SHAPES), max_size=len(SHAPES))


@settings(
    max_examples=max(8, settings().max_examples // 8),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(kinds, kinds, st.sampled_from([1, 24, 2**20]))
def test_average_of_arbitrary_gradients(worlds: Any, first: list[str], second: list[str], bucket: int) -> None:
    """Missing, dense and sparse gradients of any dtype are averaged, with any bucket size."""
    worlds(2).run(_expect_average, [first, second], bucket)


def _expect_average(kinds: list[list[str]], bucket: int) -> None:
    both, parameters = _gradients(kinds), _prepared(kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(average, "BUCKET", bucket)
        assert average_gradients(parameters) is None
    for parameter, pair in zip(parameters, zip(*both, strict=True), strict=True):
        there = [gradient for gradient in pair if gradient is not None]
        if not there:
            assert parameter.grad is None
            continue
        expected = sum(gradient.to_dense() / 2 for gradient in there)
        torch.testing.assert_close(parameter.grad, expected)


def _prepared(kinds: list[list[str]]) -> nn.ParameterList:
    """Return the parameters of this replica, with their gradients."""
    parameters = [nn.Parameter(torch.ones(s, dtype=d)) for s, d in zip(SHAPES, DTYPES, strict=True)]
    for parameter, gradient in zip(parameters, _gradients(kinds)[dist.get_rank()], strict=True):
        parameter.grad = gradient
    return nn.ParameterList(parameters)


def _gradients(kinds: list[list[str]]) -> list[list[Tensor | None]]:
    """Return the gradients of each replica."""
    return [[_gradient(k, replica, kind) for k, kind in enumerate(own)] for replica, own in enumerate(kinds)]


def _gradient(k: int, replica: int, kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(10 * k + replica)
    whole = torch.randn(SHAPES[k], generator=generator).to(DTYPES[k])
    if kind == "none":
        return None
    if kind == "dense" or not SHAPES[k]:
        return whole
    whole[: (k + replica) % 3] = 0.0
    return whole.to_sparse(1)


def sometimes(s: Layer, x: Tensor) -> Tensor:
    """Use the layer for some inputs only."""
    return x + s.rarely(x) if x.mean() > 1 else x * 1.0


def network() -> nn.Sequential:
    """Return a model with a sparse gradient, a weight shared by both stages, and a layer that only one replica uses."""
    torch.manual_seed(0)
    first, rarely = nn.Linear(6, 6), Layer(sometimes, rarely=nn.Linear(6, 6))
    layers = [nn.Embedding(10, 6, sparse=True), first, nn.Tanh(), rarely, nn.Linear(6, 6), Tied(first)]
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(10, (12, 1), generator=generator), torch.randn(12, 1, 6, generator=generator).double()


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain", "zero_bubble"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_two_replicas_of_two_stages(worlds: Any, schedule: str, checkpoint: str) -> None:
    worlds(4).run(_expect_as_the_whole, schedule, checkpoint)


def _expect_as_the_whole(schedule: str, checkpoint: str) -> None:
    mesh = mesh_of_four()
    with pytest.raises(ValueError, match=r"a mesh of one dimension, such as mesh\['pp'\]"):
        Rank(network(), [3, 3], group=mesh)
    rank = Rank(network(), [3, 3], chunks=3, checkpoint=checkpoint, group=mesh["stages"], replicas=mesh["replicas"])
    plain, (x, y) = network(), batch()
    nn.functional.mse_loss(plain(x), y).backward()
    for _ in range(2):
        rank.zero_grad()
        own = rank.step(*own_half(mesh, x, y), loss_fn=nn.functional.mse_loss, schedule=schedule)
        average_gradients(rank, mesh["replicas"])
        expected = nn.functional.mse_loss(plain(x), y)
        dist.all_reduce(own, group=mesh["replicas"].get_group())
        torch.testing.assert_close(own / 2, expected.detach())
        expect_gradients(rank, plain)


def test_gradients_of_pipes_are_averaged(worlds: Any) -> None:
    """``DistributedDataParallel`` would not average the gradients of ``step``."""
    worlds(2).run(_expect_pipes_as_the_whole)


def _expect_pipes_as_the_whole() -> None:
    plain, (x, y) = network(), batch()
    nn.functional.mse_loss(plain(x), y).backward()
    pipe = GPipe(network(), [3, 3], devices=["cpu"] * 2, chunks=3)
    x, y = (each.chunk(2)[dist.get_rank()] for each in (x, y))
    pipe.step(x, y, loss_fn=nn.functional.mse_loss)
    average_gradients(pipe)
    expect_gradients(pipe, plain)
    pipe.close()


def test_averaging_over_different_stages_raises(worlds: Any) -> None:
    for succeeded, text in worlds(2).answers(_averaged_over_stages):
        assert not succeeded
        assert "ValueError: the ranks disagree: the first parameter is '0.weight' on rank 0, but '3.rarely" in text


def _averaged_over_stages() -> None:
    average_gradients(Rank(network(), [3, 3]))


REPLICAS = 4
KINDS = [["sparse", "dense", "dense", "dense", "dense"]] * REPLICAS


@pytest.mark.parametrize("is_killed", [True, False])
def test_killed_or_failed_replica_is_named(is_killed: bool) -> None:
    """Replicas that have no connection to it in a ring name it as well, even in the next average."""
    expect_named(REPLICAS, (0, 2, 3), _lose, is_killed)


def _lose(who: int, is_killed: bool) -> str:
    planted, parameters, calls = Planted(), _prepared(KINDS), count()
    planted.how = signal.SIGKILL if is_killed else torch.OutOfMemoryError

    def dense(parameter: Tensor) -> Tensor:
        if dist.get_rank() == who and next(calls) == 6:  # in the second average, after one reduction
            planted.act()
        return right(parameter)

    with pytest.MonkeyPatch.context() as patch:
        right = average._dense
        patch.setattr(average, "BUCKET", 1)
        patch.setattr(average, "_dense", dense)
        average_gradients(parameters)
        for _ in range(2):
            with pytest.raises((LostRankError, torch.OutOfMemoryError)) as caught:
                average_gradients(parameters)
    return str(caught.value)

"""A loss may reach any leaf: what it closes over, the parameters of the pipe, what the input was computed from."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe import GPipe, LossSum

from .layers import DOUBLE, MODES, Call, Layer, Overwrites, each_way, hook, linears, piped, rows, running
from .schedules import ALONE, each_schedule

LEAVES = ("head", "free", "embed", "token")
NAMES = (*LEAVES, "0.weight", "0.bias", "2.weight")


class World:
    """A model, and the leaves that its layers and its loss use without owning them."""

    def __init__(self) -> None:
        a, b, c = linears()
        generator = torch.Generator().manual_seed(3)
        self.leaves = {name: torch.randn(3, dtype=DOUBLE, generator=generator).requires_grad_() for name in LEAVES}
        self.model = nn.Sequential(a, Call(lambda x: x * self.leaves["free"]), b, c)
        self.net: nn.Module = self.model

    def parameters(self) -> dict[str, Tensor]:
        return {**self.leaves, **dict(self.model.named_parameters())}

    def input(self) -> Tensor:
        return rows(7) * self.leaves["embed"]


TERMS: dict[str, Callable[[World, Tensor], Tensor]] = {
    "head": lambda world, o: (o * world.leaves["head"]).exp(),
    "free": lambda world, o: o * world.leaves["free"] ** 2,
    "tied": lambda world, o: (o * world.leaves["embed"]).sin(),
    "alias": lambda world, o: (o + world.leaves["head"].expand_as(o)) + 0 * o,
    "overwritten": lambda world, o: Overwrites.apply(o + world.leaves["token"].expand_as(o)).exp(),
    "last": lambda world, o: o.cos() * list(world.net.parameters())[-1],
    "decay": lambda world, o: 0.1 * sum(p.square().sum() for p in world.net.parameters()) + 0 * o,
    "penalty": lambda world, o: torch.autograd.grad(
        (o * world.leaves["head"]).exp().sum(), o, create_graph=True
    )[0],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The terms of the loss, each on some micro-batches only, and existing gradients and hooks."""

    terms: tuple[tuple[str, int], ...]
    counted: bool
    filled: frozenset[str]
    hooked: tuple[tuple[str, str], ...]
    schedule: str
    mode: str
    inline: bool
    balance: tuple[int, ...]
    chunks: int

    def loss(self, world: World) -> Callable[[Tensor, Tensor], Any]:
        def loss_fn(output: Tensor, numbers: Tensor) -> Any:
            number = int(numbers[0])
            parts = [output.square()]
            parts += [TERMS[name](world, output) for name, every in self.terms if number % every == 0]
            total = torch.stack(parts).sum(0)
            return LossSum(total.sum(), number + len(output)) if self.counted else total.mean()

        loss_fn.__annotations__["return"] = LossSum if self.counted else Tensor
        return loss_fn

    def prepare(self, world: World) -> list[tuple[tuple[str, str], Tensor]]:
        calls: list[tuple[tuple[str, str], Tensor]] = []
        parameters = world.parameters()
        for name in self.filled:
            parameters[name].grad = torch.ones_like(parameters[name])
        for name, kind in self.hooked:
            hook(parameters[name], kind, (name, kind), calls)
        return calls


def plainly(case: Case, world: World) -> tuple[Tensor, list[Any]]:
    """Compute the loss of the full mini-batch with one backward."""
    calls = case.prepare(world)
    loss_fn, numbers = case.loss(world), torch.arange(7)
    found = [
        (loss_fn(world.model(x), n), len(x))
        for x, n in zip(world.input().chunk(case.chunks), numbers.chunk(case.chunks), strict=True)
    ]
    if case.counted:
        loss = sum(total for (total, _), _ in found) / sum(count for (_, count), _ in found)
    else:
        loss = sum(each * count for each, count in found) / 7
    loss.backward()
    return loss.detach(), calls


def stepped(case: Case, world: World) -> tuple[Tensor, list[Any]]:
    calls = case.prepare(world)
    pipe = GPipe(
        world.model, list(case.balance), devices=["cpu"] * len(case.balance), chunks=case.chunks, checkpoint=case.mode
    )
    world.net = pipe
    with closing(pipe), running(case.inline):
        loss = pipe.step(
            world.input(),
            torch.arange(7),
            loss_fn=case.loss(world),
            schedule=case.schedule,
            reduction=None if case.counted else "mean",
        )
    return loss, calls


cases = st.builds(
    Case,
    st.lists(st.tuples(st.sampled_from(sorted(TERMS)), st.integers(1, 3)), max_size=4).map(tuple),
    st.booleans(),
    st.frozensets(st.sampled_from(NAMES)),
    # A hook on a non-parameter tensor used by layers fires once per micro-batch.
    st.lists(
        st.tuples(st.sampled_from([n for n in NAMES if n != "free"]), st.sampled_from(["see", "scale", "after"])),
        max_size=4,
        unique=True,
    ).map(tuple),
    st.sampled_from(ALONE),
    st.sampled_from(MODES),
    st.booleans(),
    st.sampled_from([(4,), (2, 2), (1, 3), (1, 1, 2)]),
    st.integers(1, 7),
)


@given(cases)
def test_step_trains_what_the_plain_loss_trains(case: Case):
    plain, own = World(), World()
    expected, heard = plainly(case, plain)
    loss, calls = stepped(case, own)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        {name: p.grad for name, p in own.parameters().items()},
        {name: p.grad for name, p in plain.parameters().items()},
        rtol=1e-10,
        atol=1e-10,
    )
    calls.sort(key=lambda call: call[0])
    heard.sort(key=lambda call: call[0])
    assert [name for name, _ in calls] == [name for name, _ in heard]
    torch.testing.assert_close([each for _, each in calls], [each for _, each in heard])


def reentrant(s: Layer, output: Tensor) -> Any:
    """A head that recomputes its activations in a nested backward."""
    each = torch_checkpoint(lambda o: (o * s.weight).exp(), output, use_reentrant=True)
    return LossSum(each.sum(), each.numel()) if s.counted else each.mean()


@each_schedule
@each_way
@pytest.mark.parametrize("counted", [False, True])
def test_reentrant_checkpoint_in_the_loss(schedule: str, way: Any, counted: bool):
    head = Layer(reentrant, weight=nn.Parameter(torch.ones(3, dtype=DOUBLE)), counted=counted)
    refused = pytest.raises(RuntimeError, match=r"loss_fn uses .* use_reentrant=True")
    with closing(piped(linears(), [1, 2], chunks=3)) as pipe, way(), refused:
        pipe.step(rows(7), loss_fn=head, schedule=schedule, reduction=None if counted else "mean")

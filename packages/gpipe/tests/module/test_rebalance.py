"""Layers moved between stages, between steps of training: as if they had always been there, or nothing has happened."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import BalanceError, GPipe, inline

from ..layers import DOUBLE, Call, Pop, Stash, assert_same, linears, piped, rows

pytestmark = pytest.mark.usefixtures("one_thread")
ways = pytest.mark.parametrize("way", [nullcontext, inline], ids=["threads", "inline"])
MODES = ("always", "except_last", "never")


class Case(NamedTuple):
    layers: tuple[str, ...]
    balances: list[list[int]]
    chunks: int
    modes: list[str]
    schedule: str
    deferred: bool
    inline: bool


def balances(layers: int, stages: int) -> st.SearchStrategy[list[int]]:
    cuts = st.lists(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1, unique=True)
    return cuts.map(lambda found: [b - a for a, b in zip([0, *sorted(found)], [*sorted(found), layers], strict=True)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = st.sampled_from(["linear", "tied", "tanh", "norm", "dropout", "frozen"])
    layers = ["linear", *draw(st.lists(kinds, min_size=2, max_size=6))]
    if draw(st.booleans()):
        layers.insert(draw(st.integers(0, len(layers))), "pop")
        layers.insert(draw(st.integers(0, layers.index("pop"))), "stash")
    stages = draw(st.integers(1, min(4, len(layers))))
    return Case(
        layers=tuple(layers),
        balances=draw(st.lists(balances(len(layers), stages), min_size=2, max_size=4)),
        chunks=draw(st.integers(1, 4)),
        modes=draw(st.lists(st.sampled_from(MODES), min_size=stages, max_size=stages)),
        schedule=draw(st.sampled_from(["1f1b", "fill_drain", "zero_bubble"])),
        deferred=draw(st.booleans()),
        inline=draw(st.booleans()),
    )


def model_of(kinds: tuple[str, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(3, 3, dtype=DOUBLE)

    def tied() -> nn.Module:
        layer = nn.Linear(3, 3, dtype=DOUBLE)
        layer.weight = first.weight
        return layer

    make: dict[str, Any] = {
        "linear": lambda: nn.Linear(3, 3, dtype=DOUBLE),
        "frozen": lambda: nn.Linear(3, 3, dtype=DOUBLE).requires_grad_(False),
        "tied": tied,
        "tanh": nn.Tanh,
        "norm": lambda: nn.BatchNorm1d(3, dtype=DOUBLE),
        "dropout": lambda: nn.Dropout(0.3),
        "stash": Stash,
        "pop": Pop,
    }
    found = [make[kind]() for kind in kinds]
    found[kinds.index("linear")] = first
    return nn.Sequential(*found)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trained(case: Case, moves: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The state after a step of training with each balance, or with the first alone."""
    pipe = GPipe(
        model_of(case.layers),
        case.balances[0],
        devices=["cpu"] * len(case.modes),
        chunks=case.chunks,
        checkpoint=case.modes,
        deferred_batch_norm=case.deferred,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)  # Adam makes rounding large
    losses = []
    with inline() if case.inline else nullcontext():
        for k, balance in enumerate(case.balances):
            if moves:
                pipe.rebalance(balance)
                assert pipe.balance == balance
            optimizer.zero_grad()
            torch.manual_seed(k)
            losses.append(pipe.step(rows(8), rows(8) * 2, loss_fn=loss, schedule=case.schedule).detach())
            optimizer.step()
    pipe.close()
    return pipe.state_dict(), losses


@given(case=cases())
def test_training_goes_on_as_if_nothing_had_moved(case: Case):
    torch.testing.assert_close(trained(case, moves=True), trained(case, moves=False), rtol=1e-9, atol=1e-11)


class TestKept:
    def test_layers_and_parameters_are_the_same_objects(self) -> None:
        pipe = piped(linears(5), [1, 4], checkpoint=["never", "always"], chunks=2)
        layers, parameters = list(pipe), dict(pipe.named_parameters())
        names, seen, views = list(pipe.state_dict()), [], list(pipe.partitions)
        pipe[1].register_forward_hook(lambda *_: seen.append("layer"))
        views[0].register_forward_hook(lambda *_: seen.append("partition"))
        pipe[2].eval()
        pipe.step(rows(), rows(), loss_fn=loss)
        given_then = {name: parameter.grad for name, parameter in parameters.items()}
        seen.clear()
        pipe.rebalance((3, 2))
        assert all(a is b for a, b in zip(pipe, layers, strict=True))
        assert all(parameter is parameters[name] for name, parameter in pipe.named_parameters())
        assert all(parameter.grad is given_then[name] for name, parameter in pipe.named_parameters())
        assert list(pipe.state_dict()) == names
        assert [layer.training for layer in pipe] == [True, True, False, True, True]
        assert pipe.checkpoint == ["never", "always"]
        assert [list(partition._modules) for partition in pipe.partitions] == [["0", "1", "2"], ["3", "4"]]
        assert all(a is b for a, b in zip(pipe.partitions, views, strict=True))
        pipe.step(rows(), rows(), loss_fn=loss)
        assert seen == ["layer", "partition"] * 2
        pipe.close()


class Stubborn(nn.Linear):
    """Raises when it is moved, once it is told to."""

    refuses = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.refuses:
            raise OSError("stuck")
        return super()._apply(fn, recurse)


class TestRefused:
    @pytest.mark.parametrize(
        ("balance", "error", "message"),
        [
            ([2, 1], BalanceError, r"different length \(module: 4, sum of balance: 3"),
            ([4, 0], BalanceError, "all balance numbers must be positive"),
            ([1, 1, 2], BalanceError, r"balance: expected 2 numbers, one for each partition, got \[1, 1, 2\]; .*GPipe"),
            ([4], BalanceError, "balance: expected 2 numbers"),
            (2, TypeError, r"balance must be a list of the numbers of layers"),
            (["a", 3], TypeError, r"balance\[0\] must be an int"),
            ([1, 3], OSError, "stuck"),
        ],
    )
    def test_the_pipe_is_as_it_was(self, balance: Any, error: type[Exception], message: str) -> None:
        plain = nn.Sequential(*linears(3), Stubborn(3, 3, dtype=DOUBLE))
        pipe = piped(plain, [2, 2], chunks=2)
        pipe[3].refuses = True
        engine, text = pipe._pipeline, repr(pipe)
        with pytest.raises(error, match=message):
            pipe.rebalance(balance)
        assert pipe._pipeline is engine
        assert (pipe.balance, repr(pipe)) == ([2, 2], text)
        torch.testing.assert_close(pipe(rows()), plain(rows()))
        pipe.close()

    @ways
    def test_a_layer_cannot_rebalance_its_own_pipe(self, way: Any) -> None:
        pipe: GPipe
        pipe = piped(nn.Sequential(Call(lambda x: (pipe.rebalance([2, 1]), x)[1]), *linears(2)), [1, 2])
        with way(), pytest.raises(RuntimeError, match=r"while it computes|wait for itself forever"):
            pipe(rows())
        assert pipe.balance == [1, 2]
        pipe.close()


@ways
class TestBetweenForwardAndBackward:
    def test_without_checkpoints_the_gradients_are_right(self, way: Any) -> None:
        pipe, plain = piped(linears(4), [1, 3], chunks=2, checkpoint="never"), linears(4)
        with way():
            output = pipe(rows())
            pipe.rebalance([3, 1])
            output.square().sum().backward()
        plain(rows()).square().sum().backward()
        assert_same(pipe, plain)
        pipe.close()

    def test_with_checkpoints_it_is_refused_by_name(self, way: Any) -> None:
        pipe = piped(linears(4), [1, 3], chunks=2, checkpoint="always")
        with way():
            output = pipe(rows())
            pipe.rebalance([3, 1])
            with pytest.raises(RuntimeError, match=r"was replaced or moved to another partition between"):
                output.sum().backward()
        pipe.close()

"""The layers of a pipe and of its partitions are the same, whoever changes them and in whatever way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import DeferredBatchNorm, GPipe
from gpipe.skip import pop, skippable, stash

from ..layers import DOUBLE, assert_trains_like, linears, piped, rows


def layer(seed: int = 7) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE), nn.Tanh())


def assert_one_truth(pipe: GPipe) -> None:
    """The pipe, its partitions and its names show the same layers."""
    held = [pair for partition in pipe.partitions for pair in partition.named_children()]
    assert held == list(pipe.named_children())
    assert [len(partition) for partition in pipe.partitions] == pipe.balance
    inside = [name for partition in pipe.partitions for name in partition.state_dict()]
    assert inside == list(pipe.state_dict())


# Each is done to a pipe of linears() cut into [1, 2], and to the plain model where that can take it.
REPLACING: dict[str, Callable[[Any, nn.Module], Any]] = {
    "setattr": lambda each, new: setattr(each, "1", new),
    "item": lambda each, new: each.__setitem__(1, new),
    "item from the end": lambda each, new: each.__setitem__(-2, new),
    "set_submodule": lambda each, new: each.set_submodule("1", new),
}


class TestReplacing:
    @pytest.mark.parametrize("mode", ["never", "always"])
    @pytest.mark.parametrize("used", [False, True])
    @pytest.mark.parametrize("how", REPLACING)
    def test_a_replaced_layer_is_computed_trained_and_saved(self, how: str, used: bool, mode: str) -> None:
        pipe, model = piped(linears(), [1, 2], chunks=2, checkpoint=mode), linears()
        if used:
            assert_trains_like(pipe, model)
        REPLACING[how](pipe, layer())
        model[1] = layer()
        assert_one_truth(pipe)
        assert_trains_like(pipe, model)
        torch.testing.assert_close(pipe.state_dict(), model.state_dict())

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), st.booleans())
    def test_any_row_of_replacements(self, changes: list[tuple[int, int]], step: bool) -> None:
        model = linears(4)
        pipe = piped(model, [1, 2, 1], chunks=2)
        for k, seed in changes:
            setattr(pipe, str(k), layer(seed))
            setattr(model, str(k), layer(seed))
            assert_one_truth(pipe)
        if step:
            model(rows()).square().mean().backward()
            pipe.step(rows(), loss_fn=lambda y, _: y.square().mean())
            grads = [{n: p.grad for n, p in each.named_parameters()} for each in (pipe, model)]
            torch.testing.assert_close(*grads)
        else:
            assert_trains_like(pipe, model)

    @pytest.mark.parametrize("mode", ["never", "except_last", "always"])
    def test_between_forward_and_backward_it_is_as_on_the_plain_model_or_refused(self, mode: str) -> None:
        pipe, model = piped(linears(), [1, 2], chunks=2, checkpoint=mode), linears()
        old = pipe[1]
        loss, expected = pipe(rows()).sum(), model(rows()).sum()
        pipe[1] = layer()
        pipe[0] = layer()
        expected.backward()
        if mode == "never":
            loss.backward()
            torch.testing.assert_close(old.weight.grad, model[1].weight.grad)
        else:
            with pytest.raises(
                RuntimeError,
                match=r"'[01]' was replaced or moved .* between the forward and the backward.*after backward\(\)",
            ):
                loss.backward()

    def test_deferred_batch_norm_goes_on(self) -> None:
        pipe = piped(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), [1, 1], chunks=2, deferred_batch_norm=True)
        pipe[0] = nn.BatchNorm1d(3)
        pipe[1] = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        assert isinstance(pipe[0], DeferredBatchNorm)
        assert isinstance(pipe[1][1], DeferredBatchNorm)
        assert_one_truth(pipe)
        pipe(torch.randn(4, 3))
        assert (pipe[0].num_batches_tracked, pipe[1][1].num_batches_tracked) == (1, 1)

    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
    def test_a_copy_changes_by_itself(self, copied: Callable[[GPipe], GPipe]) -> None:
        pipe, model = piped(linears(), [1, 2], chunks=2), linears()
        twin = copied(pipe)
        twin[0] = layer(1)
        twin[1] = layer(2)
        assert_one_truth(twin)
        assert_one_truth(pipe)
        assert_trains_like(pipe, model)
        model[0], model[1] = layer(1), layer(2)
        assert_trains_like(twin, model)


@skippable(stash=["skip"])
class Stash(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return super().forward(x)


@skippable(pop=["skip"])
class Pop(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return super().forward(x) + skip


class TestSkips:
    def model(self) -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(Stash(3, 3), nn.Tanh(), nn.Tanh(), Pop(3, 3), nn.Tanh()).to(DOUBLE)

    def test_one_that_leaves_a_skip_alone_is_refused(self) -> None:
        model = self.model()
        pipe = piped(model, [2, 3], chunks=2)
        with pytest.raises(TypeError, match="'skip'"):
            pipe[3] = nn.Linear(3, 3, dtype=DOUBLE)
        assert_one_truth(pipe)
        assert_trains_like(pipe, model)


PAST: dict[str, Callable[[GPipe], Any]] = {
    "a layer more": lambda pipe: setattr(pipe, "new", layer()),
    "another one, by add_module": lambda pipe: pipe.add_module("1", layer()),
    "none": lambda pipe: setattr(pipe, "1", None),
    "a parameter for a layer": lambda pipe: setattr(pipe, "1", nn.Parameter(torch.ones(1))),
    "deleted": lambda pipe: delattr(pipe, "1"),
    "partition, a layer more": lambda pipe: pipe.partitions[1].append(layer()),
    "partition, another one": lambda pipe: pipe.partitions[1].__setitem__(0, layer()),
    "partition, of another one": lambda pipe: setattr(pipe.partitions[0], "1", pipe.partitions[1].pop(0)),
    "partition, deleted": lambda pipe: pipe.partitions[1].__delitem__(0),
    "partitions, one more": lambda pipe: pipe.partitions.append(linears()),
    "partitions, another one": lambda pipe: pipe.partitions.__setitem__(0, linears()),
    "partitions, deleted": lambda pipe: pipe.partitions.__delitem__(0),
}
"""What changes the layers of the pipe or of its partitions, but not of both, nor on their device."""

REFUSED: dict[str, Callable[[GPipe], Any]] = {
    "no layer": lambda pipe: setattr(pipe, "1", 5),
    "none": lambda pipe: pipe.__setitem__(1, None),
    "the same layer twice": lambda pipe: setattr(pipe, "1", pipe[2]),
    "a layer without data": lambda pipe: setattr(pipe, "1", nn.Linear(3, 3, device="meta")),
}


class TestRefused:
    @pytest.mark.parametrize("name", REFUSED)
    def test_it_says_so_and_nothing_has_changed(self, name: str) -> None:
        pipe = piped(linears(), [1, 2], chunks=2)
        before = [*pipe.named_modules(), *pipe.partitions.named_modules()]
        with pytest.raises((TypeError, ValueError)):
            REFUSED[name](pipe)
        assert [*pipe.named_modules(), *pipe.partitions.named_modules()] == before
        assert_one_truth(pipe)
        assert_trains_like(pipe, linears())

    @pytest.mark.parametrize("name", PAST)
    @pytest.mark.parametrize("run", [lambda pipe: pipe(rows()), lambda pipe: pipe.step(rows(), loss_fn=torch.sum)])
    def test_layers_changed_past_the_pipe_are_told_of_before_anything_runs(self, name: str, run: Any) -> None:
        pipe, called = piped(linears(), [1, 2], chunks=2), []
        for each in pipe:
            each.register_forward_hook(lambda *_: called.append(None))
        PAST[name](pipe)
        with pytest.raises(RuntimeError, match=r"replace one by pipe\[index\] = layer; .* GPipe\(nn\.Sequential"):
            run(pipe)
        assert not called


def test_a_parameter_of_the_pipe_itself_is_trained_and_saved_as_on_the_plain_model() -> None:
    """Such as the weights of several losses."""
    pipe, model = piped(linears(), [1, 2], chunks=2), linears()
    for each in (pipe, model):
        each.scale = nn.Parameter(torch.full((1,), 2.0, dtype=DOUBLE))
        each.register_buffer("seen", torch.zeros(1))
        (each(rows()).square().sum() * each.scale).backward()
    assert list(pipe.state_dict()) == list(model.state_dict())
    grads = [{n: p.grad for n, p in each.named_parameters()} for each in (pipe, model)]
    torch.testing.assert_close(*grads)
    assert [name for name, _ in pipe.named_children()] == ["0", "1", "2"]

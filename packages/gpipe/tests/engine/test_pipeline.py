"""The bare pipeline returns the micro-batches that its partitions compute sequentially."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe.pipeline import Pipeline
from gpipe.skip import inspect_skip_layout
from microbatch import Batch
from streams import CPUStream

from ..layers import Call, Layer, Pop, Stash, assert_same, each_way, linears, numbered, piped, rows, within
from ..schedules import balances

Way = Callable[[], AbstractContextManager[Any]]


class Problem(NamedTuple):
    """Layers, how many each partition has, the rows of each micro-batch, and how many of these are checkpointed."""

    layers: list[nn.Module]
    balance: list[int]
    sizes: list[int]
    checkpoint_stop: int

    def partitions(self, layers: list[nn.Module]) -> list[nn.Sequential]:
        rest = iter(layers)
        return [nn.Sequential(*(next(rest) for _ in range(count))) for count in self.balance]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Micro-batches may differ in rows, which no tensor that is cut evenly gives."""
    order = draw(st.lists(st.sampled_from(["linear", "tanh", "pair", "skip", "dropout of nothing"]), max_size=4))
    kinds: dict[str, Callable[[], list[nn.Module]]] = {
        "linear": lambda: list(linears(1)),
        "tanh": lambda: [nn.Tanh()],
        "pair": lambda: [Call(lambda x: (x * 2, x.detach())), Call(lambda pair: pair[0] * pair[1])],
        "skip": lambda: [Stash(), *linears(1), Pop()],
        "dropout of nothing": lambda: [nn.Dropout(0.0)],
    }
    if "skip" in order:  # of one name there is one in a model
        order = [name for k, name in enumerate(order) if name != "skip" or k == order.index("skip")]
    layers = [*linears(1), *(layer for name in order for layer in kinds[name]())]
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return Problem(layers, draw(balances(len(layers), 4)), sizes, draw(st.integers(0, len(sizes) + 1)))


@each_way
@given(problem=problems(), runs=st.integers(1, 2), own_options=st.booleans())
def test_micro_batches_pass_through_all_partitions(way: Way, problem: Problem, runs: int, own_options: bool) -> None:
    """The results of :meth:`run` may be run again."""
    plain, layers = nn.Sequential(*problem.layers), copy.deepcopy(problem.layers)
    partitions, options = problem.partitions(layers), {}
    if own_options:
        options = {
            "devices": [torch.device("cpu")] * len(partitions),
            "copy_streams": [[CPUStream]] * len(partitions),
            "skip_layout": inspect_skip_layout(partitions),
        }
    inputs = [rows(size, grad=True) for size in problem.sizes]
    own = [x.detach().clone().requires_grad_() for x in inputs]
    batches = [Batch(x) for x in own]
    pipeline = Pipeline(batches, partitions, checkpoint_stop=problem.checkpoint_stop, **options)
    with way():
        for _ in range(runs):
            pipeline.run()
        assert pipeline.batches is batches
        sum(batch.tensor.square().sum() for batch in batches).backward()
    expected = inputs
    for _ in range(runs):
        expected = [plain(x) for x in expected]
    sum(y.square().sum() for y in expected).backward()
    torch.testing.assert_close([batch.tensor for batch in batches], expected)
    torch.testing.assert_close([x.grad for x in own], [x.grad for x in inputs])
    assert_same(nn.Sequential(*layers), plain)


@each_way
@pytest.mark.parametrize("which", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_failure_leaves_micro_batches_unchanged(which: list[int], way: Way) -> None:
    """The earliest failure is raised, with a note on micro-batch and partition. A second run is complete."""
    failing = set(which)

    def layer(x: Tensor) -> Tensor:
        if int(x[0]) in failing:
            raise ArithmeticError(f"of {int(x[0])}")
        return x

    inputs = list(numbered(3).split(1))
    batches = [Batch(x) for x in inputs]
    pipeline = Pipeline(batches, [nn.Identity(), Call(layer)])
    with way(), pytest.raises(ArithmeticError, match=f"of {which[0]}") as caught:
        within(20, pipeline.run) if way is nullcontext else pipeline.run()
    assert [batch.tensor for batch in batches] == inputs
    (note,) = caught.value.__notes__
    assert f"micro-batch {which[0]}" in note
    assert "partition 1" in note
    failing.clear()
    pipeline.run()
    torch.testing.assert_close([batch.tensor for batch in batches], inputs)


def test_only_first_micro_batch_is_cloned():
    x, seen = rows(), list[int]()
    note = Layer(lambda s, x: (seen.append(x.untyped_storage().data_ptr()), s.m[0](x))[1], linears(1))
    piped(nn.Sequential(note), [1], chunks=3, checkpoint="never")(x)
    assert [at == x.untyped_storage().data_ptr() for at in seen] == [False, True, True]

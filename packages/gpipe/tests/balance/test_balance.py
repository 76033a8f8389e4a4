import inspect
import re
from contextlib import nullcontext
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gpipe.balance import _balance as module_under_test
from gpipe.balance import (
    balance_by_flops,
    balance_by_parameters,
    balance_by_size,
    balance_by_time,
    balance_cost,
    uniform,
)


@st.composite
def problems(draw):
    cost = draw(st.lists(st.integers(0, 20) | st.floats(0, 20), min_size=1, max_size=7))
    return cost, draw(st.integers(1, len(cost)))


def bottleneck(cost, balance):
    ends = [sum(balance[:j]) for j in range(len(balance) + 1)]
    return max(sum(cost[a:b]) for a, b in pairwise(ends))


def every_balance(layers, partitions):
    return [[b - a for a, b in pairwise([0, *cuts, layers])] for cuts in combinations(range(1, layers), partitions - 1)]


def cuts(balance):
    return {sum(balance[:j]) for j in range(1, len(balance))}


@given(problems(), st.data())
def test_balance_with_constraints_is_optimal(problem, data):
    cost, partitions = problem
    wanted = data.draw(st.sampled_from(every_balance(len(cost), partitions)))  # so that there is an answer
    layers = range(1, len(cost))
    pin = data.draw(st.sets(st.sampled_from(sorted(cuts(wanted))))) if partitions > 1 else set()
    forbid = data.draw(st.sets(st.sampled_from(layers))) - cuts(wanted) if layers else set()
    found = balance_cost(cost, partitions, pin=pin, forbid=forbid)
    legal = [b for b in every_balance(len(cost), partitions) if pin <= cuts(b) and not forbid & cuts(b)]
    assert found in legal
    assert bottleneck(cost, found) == pytest.approx(min(bottleneck(cost, b) for b in legal), rel=1e-12)


def named():
    model = nn.Sequential()
    for name in ["embed", "block1", "relu1", "block2", "relu2", "head"]:
        model.add_module(name, nn.ReLU() if name.startswith("relu") else nn.Linear(6, 6))
    return model


@pytest.mark.parametrize(
    ("constraints", "balance"),
    [
        ({}, [3, 3]),
        ({"pin": ["embed"]}, [3, 3]),  # the first layer begins a partition anyhow
        ({"pin": ["block1"]}, [1, 5]),
        ({"pin": [4]}, [4, 2]),
        ({"forbid": ["block2"]}, [4, 2]),
        ({"forbid": ["block1", "relu1", 3, "relu2"]}, [5, 1]),
        ({"pin": ["head"], "forbid": ["relu1"]}, [5, 1]),
    ],
)
def test_layers_are_called_by_name(constraints, balance):
    assert uniform(2, named(), **constraints) == balance
    assert uniform(2, named(), **{name: iter(layers) for name, layers in constraints.items()}) == balance


def test_integers_of_numpy_do_not_overflow():
    costs = [2_000_000_000, 1_500_000_000, 400_000_000, 300_000_000, 1_000_000_000]
    assert module_under_test.balance_cost(torch.tensor(costs, dtype=torch.int32).numpy(), 2) == [1, 4]


@pytest.mark.parametrize("layer", ["block", 6, -1])
def test_unknown_layer_raises_with_known_names(layer):
    for argument in ("pin", "forbid"):
        with pytest.raises(ValueError, match=f"{argument}: {layer!r} is not a layer; the layers are embed, block1"):
            uniform(2, named(), **{argument: [layer]})
        with pytest.raises(TypeError, match=f"{argument}: expected a list of layers"):
            uniform(2, named(), **{argument: layer})


@given(
    widths=st.lists(st.integers(1, 40), min_size=3, max_size=8),
    rows=st.integers(1, 64),
    chunks=st.integers(1, 8),
    scale=st.sampled_from([0.0, 1.0, 2.0, 4.0, 30.0]),
    partitions=st.integers(1, 3),
)
@example(widths=[1, 64, 1, 64, 16, 16, 16, 16], rows=64, chunks=1, scale=30.0, partitions=2)
@example(widths=[1, 64, 1, 64, 16, 16, 16, 16], rows=64, chunks=1, scale=0.0, partitions=2)
@example(widths=[1, 64, 1, 64, 16, 16, 16, 16], rows=64, chunks=8, scale=2.0, partitions=2)
def test_by_size_adds_activations_and_scaled_parameters(widths, rows, chunks, scale, partitions):
    """The cost of a linear layer is one micro-batch of its output, plus its parameters times the scale."""
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    partitions = min(partitions, len(model))
    cost = [4 * (rows / chunks * b + scale * (a * b + b)) for a, b in pairwise(widths)]
    found = balance_by_size(
        partitions, model, torch.rand(rows, widths[0]), chunks=chunks, param_scale=scale, device="meta"
    )
    assert bottleneck(cost, found) <= bottleneck(cost, balance_cost(cost, partitions)) * 1.001 + 8


def test_by_time_balances_seconds_and_measures_nothing_else(monkeypatch):
    """Forward and backward, and not rounded to microseconds."""
    monkeypatch.setattr(module_under_test, "profile", lambda *args, **options: pytest.fail("measured more"))
    monkeypatch.setattr(module_under_test, "profile_seconds", lambda *args, **options: [3e-7, 1e-7, 1e-7, 1e-7])
    model = nn.Sequential(*(nn.ReLU() for _ in range(4)))
    assert balance_by_time(2, model, torch.rand(1)) == [1, 3]


def table():
    rows = re.findall(r"^ {4}(\w+)(?:\((.*)\))? +(\d)$", inspect.getdoc(balance_by_size).replace("\n", "\n    "), re.M)
    return [(name, eval(f"dict({options})"), int(scale)) for name, options, scale in rows]


@pytest.mark.parametrize(("name", "options", "scale"), table())
def test_the_table_of_optimizers_is_right(name, options, scale):
    parameter = nn.Parameter(torch.rand(1000))
    optimizer = getattr(torch.optim, name)([parameter], **options)
    parameter.grad = torch.rand(1000)
    optimizer.step()
    state = sum(x.numel() for x in optimizer.state[parameter].values() if isinstance(x, torch.Tensor) and x.numel() > 1)
    assert 2 + state / 1000 == scale


@pytest.mark.parametrize(("threads", "share", "fails"), [(5, 2, False), (1, 1, True)])
def test_by_time_uses_threads_of_a_partition(threads, share, fails):
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            if fails:
                raise LookupError
            return x

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(LookupError) if fails else nullcontext():
            balance_by_time(2, nn.Sequential(Looks(), nn.ReLU()), torch.rand(1), timeout=1e-6, device="cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {share}


WAYS = [balance_by_time, balance_by_size, balance_by_flops, balance_by_parameters, uniform]


@pytest.mark.parametrize("balance_by", WAYS)
def test_mistakes_cost_no_measurement(balance_by, monkeypatch):
    for name in ("profile", "profile_sizes"):
        monkeypatch.setattr(module_under_test, name, None)
    sample = [torch.rand(1, 6)] if balance_by in WAYS[:3] else []
    for partitions, pin in ((0, []), (7, []), (2, ["nowhere"]), (2, ["head", "block1"])):
        with pytest.raises(ValueError, match=r"."):
            balance_by(partitions, named(), *sample, pin=pin)
    with pytest.raises(TypeError, match=r"expected nn\.Sequential, got Linear"):
        balance_by(1, nn.Linear(6, 6), *sample)
    with pytest.raises(ValueError, match=r"."):
        balance_by(1, nn.Sequential(), *sample)

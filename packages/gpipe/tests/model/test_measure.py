"""The seconds of a model's blocks: measured on a sample, without a change of the model."""

import copy
import random
from contextlib import closing
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.model._blocks import candidates, divide
from gpipe.model._measure import Span, compute_seconds, measure_rounds
from microbatch import Arguments, Replicate

from ..layers import DOUBLE, Layer, assert_same, rows
from .forwards import Told, models
from .residuals import Residuals, residuals

CPU = torch.device("cpu")


def slow(times: int) -> nn.Module:
    def compute(layer: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = layer.m[0](x).tanh()
        return x

    return Layer(compute, nn.Linear(3, 3))


def slowest(blocks: int, at: int) -> Residuals:
    return Residuals(*(slow(400 if k == at else 1) for k in range(blocks)))


@given(st.integers(3, 6), st.data())
def test_a_slow_block_is_alone_on_its_stage(blocks: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, blocks - 2))
    model = slowest(blocks, at)
    rounds = measure_rounds(model, candidates(model), inputs(rows(4)), CPU, same, timeout=0.2)
    assert divide(model, 3, costs=partial(compute_seconds, rounds)).balance == [at, 1, blocks - at - 1]


def test_sample_balances_pipe_by_time() -> None:
    with closing(GPipe(slowest(4, 2), devices=["cpu"] * 3, sample=rows(4))) as pipe:
        assert pipe.balance == [2, 1, 1]


def test_slow_block_is_divided_at_slow_part() -> None:
    inner = nn.Sequential(slow(300), slow(1), slow(300))
    model = Residuals(nn.Linear(3, 3), inner, nn.Linear(3, 3))
    with closing(GPipe(model, devices=["cpu"] * 2, sample=rows(4))) as pipe:
        assert "layers.1.2" in pipe.block_names
        assert pipe.block_names[pipe.balance[0]] in ("layers.1.1", "layers.1.2")


def test_operations_between_blocks_count_for_the_block_before() -> None:
    model = Residuals(*(nn.Linear(3, 3) for _ in range(5)))

    def between(k: int, x: Tensor) -> Tensor:
        for _ in range(400 if k == 2 else 0):
            x = x.sin() + x
        return x

    model.between = between
    seconds = compute_seconds(
        measure_rounds(model, candidates(model), inputs(rows(4)), CPU, same, timeout=0.2), candidates(model)
    )
    assert max(range(5), key=seconds.__getitem__) == 1


def same(output: Any) -> Any:
    return output


def inputs(*args: Any) -> Any:
    from gpipe.module._inputs import Inputs

    return Inputs(args, {})


names = st.sampled_from(["a", "a.0", "a.1", "b", "c", "c.0", "c.1"])


@given(st.lists(st.lists(st.tuples(names, st.floats(0, 9)), max_size=9), min_size=1, max_size=3))
def test_costs_add_up_for_any_granularity(rounds: list[list[tuple[str, float]]]) -> None:
    spans = [[Span(None, 1.0), *(Span(*each) for each in one)] for one in rounds[:1]]
    total = sum(span.seconds for span in spans[0])
    for blocks in (["a", "b", "c"], ["a.0", "a.1", "b", "c"], ["a", "b", "c.0", "c.1"], ["b"]):
        found = compute_seconds(spans, dict.fromkeys(blocks, nn.ReLU()))
        assert sum(found) == pytest.approx(total)
        assert len(found) == len(blocks)


class Drawing(Residuals):
    """Draws random numbers of all kinds, and changes a buffer."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(4)))
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x) * random.random() * numpy.random.rand()
        return super().forward(x)


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[2]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_does_not_change(training: bool) -> None:
    model = Drawing().train(training)
    model.layers[1].eval()
    model(rows(4)).sum().backward()
    before, sample = copy.deepcopy(model), rows(4).requires_grad_()
    for new, old in zip(before.parameters(), model.parameters(), strict=True):
        new.grad = None if old.grad is None else old.grad.clone()
    drawn = states()
    with closing(GPipe(model, devices=["cpu"] * 2, sample=sample)) as pipe:
        assert states() == drawn
        assert_same(pipe[:], before)
        torch.testing.assert_close(dict(model.named_buffers()), dict(before.named_buffers()))
        assert [each.training for each in model.modules()] == [each.training for each in before.modules()]
        assert sample.grad is None
        assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())


@given(models(least=2, in_place=False), st.integers(2, 4))
def test_any_model_is_measured(told: Told, stages: int) -> None:
    model, x = told.model(), rows(4, 2).to(next(told.model().parameters()).dtype)
    for pick in (same, lambda output: [output]):
        found = measure_rounds(model, candidates(model), inputs(x), CPU, pick, timeout=0.001)
        seconds = compute_seconds(found, candidates(model))
        assert min(seconds) >= 0
        assert sum(seconds) > 0


@pytest.mark.parametrize("sample", [rows(4), (rows(4),), {"x": rows(4)}, Arguments((rows(4),), {}), Replicate(rows(4))])
def test_sample_is_passed_like_call_arguments(sample: Any) -> None:
    with closing(GPipe(slowest(4, 2), devices=["cpu"] * 3, sample=sample)) as pipe:
        assert pipe.balance == [2, 1, 1]


@pytest.mark.parametrize(
    "options", [{"balance": [1, 3], "devices": ["cpu"] * 2}, {"devices": ["cpu"]}, {"devices": ["meta"] * 2}]
)
def test_nothing_is_measured_in_vain(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = residuals()
    if options["devices"][0] == "meta":
        model.to("meta")
    monkeypatch.setattr("gpipe.model._measure.measure_rounds", lambda *_: pytest.fail("the model has run"))
    with closing(GPipe(model, sample=rows(4), **options)) as pipe:
        assert sum(pipe.balance) == 4


def test_a_frozen_model_is_measured() -> None:
    with closing(GPipe(slowest(4, 2).requires_grad_(False), devices=["cpu"] * 3, sample=rows(4))) as pipe:
        assert pipe.balance == [2, 1, 1]


def test_blocks_that_are_named_are_measured() -> None:
    model = slowest(4, 2)
    with closing(GPipe(model, devices=["cpu"] * 2, sample=rows(4), blocks=["embed", "layers.2", "head"])) as pipe:
        assert pipe.block_names == ["embed", "layers.2", "head"]


def test_an_error_of_the_model_names_the_sample() -> None:
    with pytest.raises(RuntimeError) as caught:
        GPipe(residuals(), devices=["cpu"] * 2, sample=torch.zeros(4, 5, dtype=DOUBLE))
    assert "Residuals was called with the sample, to measure its blocks" in caught.value.__notes__


def test_oversized_model_is_balanced_by_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    expected = GPipe(slowest(4, 2).to("meta"), devices=["meta"] * 2, sample=rows(4)).balance
    monkeypatch.setattr("gpipe.model._measure.measure_rounds", full)
    with closing(GPipe(slowest(4, 2), devices=["cpu"] * 2, sample=rows(4))) as pipe:
        assert pipe.balance == expected
    assert "Residuals does not fit on cpu as a whole" in caplog.text

"""``step``, ``evaluate`` and ``pipe(**batch)``, alone, in a Trainer and in two processes: the plain model's loss."""

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, flatten
from gpipe.schedule import SCHEDULES

from .families import EVERY, ROWS, Family
from .labelled import BATCHES, BRANCHING, CASES, Batch, batch_of, made

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


def piped(model: nn.Module, sample: Batch) -> GPipe:
    layers = flatten(model, sample)
    half = len(layers) // 2
    return GPipe(
        layers, [half, len(layers) - half], devices=["cpu:0"] * 2, chunks=3
    )  # one worker, which suits any schedule


def assert_same(found: Tensor, pipe: GPipe, expected: Tensor, plain: nn.Module, family: Family) -> None:
    bound = max(family.tolerance, 1e-5)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-8, check_dtype=False)
    own = dict(plain.named_parameters(remove_duplicate=False))
    largest = max(float(p.grad.abs().max()) for p in own.values() if p.grad is not None)
    for name, parameter in pipe_parameters(pipe).items():
        gradient = own[name].grad
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert float((parameter.grad - gradient).abs().max()) <= bound * largest


def pipe_parameters(pipe: GPipe) -> dict[str, nn.Parameter]:
    """By the names of the model, which those in a state dict are."""
    return {name: value for name, value in pipe.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)}


@pytest.mark.parametrize(("name", "kind"), BATCHES)
def test_it_is_that_of_the_plain_model(name: str, kind: str) -> None:
    family, _ = CASES[name]
    model, plain = made(family)
    padded = kind == "padded"
    pipe = piped(model, batch_of(name, 2, "packed" if kind == "packed" else "unpadded"))
    for more in ({}, *({"num_items_in_batch": items} for items in (11, torch.tensor(11)) if padded)):
        batch: Batch = {**batch_of(name, ROWS + 1, kind), **more}
        plain.zero_grad()
        try:
            expected = plain(**batch).loss
        except TypeError:  # it takes no number of items
            with pytest.raises(TypeError, match="num_items_in_batch"):
                pipe.step(**batch)
            continue
        expected.backward()
        if padded and name in BRANCHING:
            assert_refused(pipe, batch, family)
        else:
            loss = pipe.evaluate(**batch)
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-8, check_dtype=False)
            for schedule in SCHEDULES if not more else ("1f1b",):
                pipe.zero_grad()
                assert_same(pipe.step(**batch, schedule=schedule), pipe, expected, plain, family)
        pipe.zero_grad()
        whole = pipe(**batch).loss
        whole.backward()
        assert_same(whole, pipe, expected, plain, family)


def assert_refused(pipe: GPipe, batch: Batch, family: Family) -> None:
    for method in (pipe.step, pipe.evaluate):
        with pytest.raises(
            ValueError, match=rf"{family.model} computes a loss that cannot be put together.*pipe\(\*\*"
        ):
            method(**batch)


def test_a_contrast_within_the_batch_is_refused_by_a_step() -> None:
    family = EVERY["CLIP"]
    model, plain = made(family)
    batch = {**family.inputs(ROWS), "return_loss": True}
    pipe = piped(model, {key: value[:2] if isinstance(value, Tensor) else value for key, value in batch.items()})
    assert_refused(pipe, batch, family)
    expected, found = plain(**batch).loss, pipe(**batch).loss
    expected.backward()
    found.backward()
    assert_same(found, pipe, expected, plain, family)

"""The loss that a model computes, by ``step``, ``evaluate`` and ``pipe(**batch)``, is the plain model's."""

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, flatten
from gpipe.schedule import SCHEDULES

from .families import ROWS, Family
from .labelled import ADDS, BATCHES, CASES, Batch, batch_of, made

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]
WAITING = ("fill_drain", "looped_bfs")
"""The schedules that begin backwards when all forwards are done."""


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
        loss = pipe.evaluate(**batch)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-8, check_dtype=False)
        for schedule in (None, *(() if more else SCHEDULES)):
            pipe.zero_grad()
            if name not in ADDS and schedule not in (None, *WAITING):
                with pytest.raises(ValueError, match=f"^{family.model} computes a loss.*leave out schedule="):
                    pipe.step(**batch, schedule=schedule)
                assert all(parameter.grad is None for parameter in pipe.parameters())
                continue
            assert_same(pipe.step(**batch, schedule=schedule), pipe, expected, plain, family)
            if schedule is None:
                assert pipe.last_schedule.name == ("1f1b" if name in ADDS else "fill_drain")
        pipe.zero_grad()
        whole = pipe(**batch).loss
        whole.backward()
        assert_same(whole, pipe, expected, plain, family)

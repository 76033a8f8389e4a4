"""Batches of tokenizers go into a pipe as they are."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import FAMILIES, ROWS, transformers


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    found = FAMILIES["Llama"].inputs(rows)
    return {**found, "labels": found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)}


@pytest.fixture(params=["Llama", "GPT-2"])
def both(request: pytest.FixtureRequest) -> tuple[nn.Module, GPipe]:
    model = FAMILIES[request.param].make()
    return copy.deepcopy(model), GPipe(model, devices=["cpu", "cpu"], chunks=3)


def test_as_keywords(both: tuple[nn.Module, GPipe]) -> None:
    plain, pipe = both
    expected = plain(**batch()).loss.detach()
    for method in (pipe.step, pipe.evaluate):
        for given in (batch(), transformers.BatchEncoding(batch())):
            torch.testing.assert_close(method(**given), expected)
    with pytest.raises(TypeError, match=r"'los_fn' .* did you mean 'loss_fn'"):
        pipe.step(**batch(), los_fn=3)


def test_return_dict_false_returns_tuple(both: tuple[nn.Module, GPipe]) -> None:
    plain, pipe = both
    found, expected = pipe(**batch(), return_dict=False), plain(**batch(), return_dict=False, use_cache=False)
    assert type(found) is tuple
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for method in (pipe.step, pipe.evaluate):  # its only scalar is the loss
        torch.testing.assert_close(method(**batch(), return_dict=False), expected[0].detach())

"""Models of Hugging Face's transformers, flattened: they train in a pipeline as they do by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, flatten

from .families import FAMILIES, ROWS, Family
from .table import distance, gradients, piped

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


def pipe_of(name: str, model: nn.Module, **options: str) -> GPipe:
    return piped(flatten(model, FAMILIES[name].inputs(2)), **options)


def assert_alike(model: nn.Module, plain: nn.Module, family: Family) -> None:
    assert distance(gradients(model), gradients(plain)) <= family.tolerance


def test_other_lengths_than_in_the_sample() -> None:
    family = FAMILIES["Llama"]
    model = family.make()
    pipe = pipe_of("Llama", model)
    for length in (5, 12):
        inputs = {key: value[:, :length] for key, value in family.inputs(ROWS).items()}
        torch.testing.assert_close(pipe(**inputs), model(**inputs)["logits"])


def labels(name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padding does not count; nor does more or less of each row."""
    if "Classification" in FAMILIES[name].model:
        return {"labels": torch.arange(len(next(iter(inputs.values())))) % 5}
    found = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    for k, row in enumerate(found):
        row[2 + k % 9 :] = -100
    return {"labels": found}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "EncoderModel" not in family.model])
def test_the_whole_output_with_other_rows_than_in_the_sample(name: str) -> None:
    family = FAMILIES[name]
    model = family.make()
    plain = copy.deepcopy(model)
    few, many = (inputs | labels(name, inputs) for inputs in (family.inputs(3), family.inputs(7)))
    layers = flatten(model, few)
    pipe = piped(layers, chunks=4)
    found, expected = pipe(**many), plain(**many)
    found["loss"].backward()
    expected["loss"].backward()
    assert type(found) is type(expected)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=family.tolerance, atol=family.tolerance)
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=family.tolerance, atol=family.tolerance)
    assert_alike(model, plain, family)

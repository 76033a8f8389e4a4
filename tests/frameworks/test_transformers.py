"""Models of Hugging Face's transformers, flattened: they train in a pipeline as they do by themselves."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe import Arguments, GPipe, flatten, inline

from .families import FAMILIES, ROWS, Family

MODELS = Path(__file__).parents[2] / "docs" / "models.md"

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::FutureWarning")]
each_family = pytest.mark.parametrize("name", FAMILIES)


def balance(layers: nn.Sequential) -> list[int]:
    n = len(layers)
    return [n // 3, n // 3, n - 2 * (n // 3)]


def pipe_of(name: str, model: nn.Module, **options: object) -> GPipe:
    layers = flatten(model, FAMILIES[name].inputs(2))
    sizes = balance(layers)
    return GPipe(layers, sizes, devices=["cpu"] * len(sizes), chunks=3, **options)


def result(output: dict[str, Tensor]) -> Tensor:
    return output["logits"] if "logits" in output else output["last_hidden_state"]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_alike(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], family: Family) -> None:
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=family.tolerance, atol=family.tolerance * largest)


def step(pipe: GPipe, family: Family, schedule: str) -> None:
    pipe.step(Arguments((), family.inputs(ROWS)), loss_fn=lambda out, _: out.square().mean(), schedule=schedule)


@each_family
@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("1f1b", "never"), ("fill_drain", "always"), ("zero_bubble", "never")]
)
def test_gradients_are_those_of_the_model(name: str, schedule: str, checkpoint: str) -> None:
    family = FAMILIES[name]
    model = family.make()
    plain = copy.deepcopy(model)
    pipe = pipe_of(name, model, checkpoint=checkpoint)
    step(pipe, family, schedule)
    result(plain(**family.inputs(ROWS))).square().mean().backward()
    assert_alike(gradients(model), gradients(plain), family)


@each_family
def test_state_dicts_have_the_names_of_the_model(name: str) -> None:
    model = FAMILIES[name].make()
    pipe = pipe_of(name, model)
    assert set(pipe.state_dict()) == set(model.state_dict())
    fresh = {key: value * 2 + 1 for key, value in model.state_dict().items()}
    pipe.load_state_dict(fresh)
    assert all(torch.equal(value, fresh[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.dropout])
def test_dropout_is_repeated_in_recomputations(name: str) -> None:
    family = FAMILIES[name]
    found = []
    for checkpoint in ("never", "always"):
        model = family.make(dropout=0.3)
        torch.manual_seed(5)
        step(pipe_of(name, model, checkpoint=checkpoint), family, "1f1b")
        found.append(gradients(model))
    assert_alike(found[0], found[1], family)


@each_family
def test_a_frozen_base_stays_frozen(name: str) -> None:
    family = FAMILIES[name]
    model = family.make()
    for parameter in list(model.parameters())[: -len(list(model.parameters())) // 2]:
        parameter.requires_grad_(False)
    plain = copy.deepcopy(model)
    step(pipe_of(name, model), family, "1f1b")
    result(plain(**family.inputs(ROWS))).square().mean().backward()
    assert_alike(gradients(model), gradients(plain), family)


def test_other_lengths_than_in_the_sample() -> None:
    family = FAMILIES["Llama"]
    model = family.make()
    pipe = pipe_of("Llama", model)
    for length in (5, 12):
        inputs = {key: value[:, :length] for key, value in family.inputs(ROWS).items()}
        torch.testing.assert_close(pipe(**inputs), model(**inputs)["logits"])


def test_a_loss_of_the_models_own() -> None:
    family = FAMILIES["Llama"]
    model = family.make()
    plain = copy.deepcopy(model)
    inputs = family.inputs(ROWS)
    inputs = {**inputs, "labels": inputs["input_ids"]}
    layers = flatten(model, {key: value[:2] for key, value in inputs.items()})
    pipe = GPipe(layers, [3, 3], devices=["cpu"] * 2, chunks=3)
    loss = pipe.step(Arguments((), inputs), loss_fn=lambda loss, _: loss)
    expected = plain(**inputs)["loss"]
    torch.testing.assert_close(loss, expected.detach())
    expected.backward()
    assert_alike(gradients(model), gradients(plain), family)


def labels(name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padding does not count; nor does more or less of each row."""
    if "Classification" in FAMILIES[name].model:
        return {"labels": torch.arange(len(next(iter(inputs.values())))) % 5}
    found = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    for k, row in enumerate(found):
        row[2 + k % 9 :] = -100
    return {"labels": found}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "EncoderModel" not in family.model])
@pytest.mark.parametrize("threads", [True, False], ids=["threads", "inline"])
def test_the_whole_output_with_other_rows_than_in_the_sample(name: str, threads: bool) -> None:
    family = FAMILIES[name]
    model = family.make()
    plain = copy.deepcopy(model)
    few, many = (inputs | labels(name, inputs) for inputs in (family.inputs(3), family.inputs(7)))
    layers = flatten(model, few)
    pipe = GPipe(layers, balance(layers), devices=["cpu"] * len(balance(layers)), chunks=4)
    with nullcontext() if threads else inline():
        found, expected = pipe(**many), plain(**many)
        found["loss"].backward()
    expected["loss"].backward()
    assert type(found) is type(expected)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=family.tolerance, atol=family.tolerance)
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=family.tolerance, atol=family.tolerance)
    assert_alike(gradients(model), gradients(plain), family)


def test_the_models_own_checkpointing() -> None:
    family = FAMILIES["Llama"]
    model = family.make()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step(pipe_of("Llama", model, checkpoint="never"), family, "1f1b")
    result(plain(**family.inputs(ROWS))).square().mean().backward()
    assert_alike(gradients(model), gradients(plain), family)


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    family = FAMILIES["Llama"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(family.make(), config).double()
    plain = copy.deepcopy(model)
    step(pipe_of("Llama", model), family, "1f1b")
    result(plain(**family.inputs(ROWS))).square().mean().backward()
    assert_alike(gradients(model), gradients(plain), family)


@each_family
def test_the_page_tells_of_every_family(name: str) -> None:
    names = [name for name, _ in FAMILIES[name].make().named_parameters(remove_duplicate=False)]
    tied = len(names) - len(list(FAMILIES[name].make().parameters()))
    assert re.search(rf"^\| {name} \|.*\| {'yes' if tied else '–'} \|$", MODELS.read_text(), re.MULTILINE)

"""What models collect while their blocks run: hidden states, attentions, the logits of routers and their balance."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from gpipe import GPipe, flatten

from .families import EVERY
from .table import distance, gradients

ROUTERS = [(name, "output_router_logits") for name in ("Mixtral", "gpt-oss", "Qwen3-MoE")]
OTHERS = [("Llama", "output_hidden_states"), ("Qwen3", "output_attentions"), ("ALBERT words", "output_hidden_states")]
FLAGS = [*ROUTERS, ("T5", "output_hidden_states")]
MODELS = {**EVERY, "ALBERT words": EVERY["ALBERT"]._replace(model="AlbertForMaskedLM")}


def made(name: str, **settings: Any) -> nn.Module:
    # Weights of attention are given in this implementation alone.
    return MODELS[name].make(attn_implementation="eager", router_aux_loss_coef=0.3, use_cache=False, **settings)


def batch_of(name: str, *, labelled: bool = True) -> dict[str, Any]:
    found = MODELS[name].inputs(6)
    labels = found["input_ids"].masked_fill(torch.arange(6)[:, None] * 2 > torch.arange(12), -100)
    return {**found, "labels": labels} if labelled else found


def piped(model: nn.Module, batch: dict[str, Any], **options: Any) -> GPipe:
    sample = {key: value[:2] if isinstance(value, Tensor) else value for key, value in batch.items()}
    return GPipe(model, sample=sample, devices=["cpu"] * 2, chunks=3, **options)


def total(output: Any) -> Tensor:
    """A loss of the model's own, and of everything else that it returns."""
    others = [each for each in _pytree.tree_leaves({**output}) if isinstance(each, Tensor) and each.requires_grad]
    return sum((each.square().mean() for each in others), output["loss"])  # type: ignore[return-value]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("name", "flag"), [*ROUTERS, *OTHERS])
def test_the_output_with_the_loss_of_all_rows_and_the_gradients_are_the_model_s(
    name: str, flag: str, checkpoint: str
) -> None:
    by_argument = checkpoint == "never"
    model = made(name) if by_argument else made(name, **{flag: True})
    batch = {**batch_of(name), **({flag: True} if by_argument else {})}
    plain, pipe = copy.deepcopy(model), piped(model, batch, checkpoint=checkpoint)
    expected, found = plain(**batch), pipe(**batch)
    assert {**found}.keys() == {**expected}.keys()
    assert any(flag.endswith(kind) for kind in {**found})
    torch.testing.assert_close({**found}, {**expected}, rtol=1e-4, atol=1e-4)
    total(expected).backward()
    total(found).backward()
    assert distance(gradients(model), gradients(plain)) < max(MODELS[name].tolerance, 1e-5)
    torch.testing.assert_close(pipe.step(**batch), expected.loss.detach())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("coefficient", [0.3, 1e-6])
@pytest.mark.parametrize("name", [name for name, _ in ROUTERS])
def test_a_balancing_loss_however_small_is_computed_once(name: str, coefficient: float, checkpoint: str) -> None:
    """It is a product of means over all tokens, which those of micro-batches do not add up to."""
    batch = batch_of(name)
    plain = made(name, output_router_logits=True)
    plain.router_aux_loss_coef = coefficient  # type: ignore[assignment]
    model = copy.deepcopy(plain)
    pipe = piped(model, batch, checkpoint=checkpoint)
    expected = plain(**batch).loss
    expected.backward()
    for method in (pipe.step, pipe.evaluate):
        torch.testing.assert_close(method(**batch), expected.detach())
    assert pipe.last_schedule is not None
    assert pipe.last_schedule.name == "fill_drain"
    assert distance(gradients(model), gradients(plain)) < max(MODELS[name].tolerance, 1e-5)


def test_a_part_of_the_output_may_be_picked() -> None:
    batch = {**batch_of("Llama", labelled=False), "output_hidden_states": True}
    model = made("Llama")
    pipe = piped(model, batch, pick="hidden_states")
    torch.testing.assert_close(pipe(**batch), model(**batch).hidden_states)


def test_a_block_that_runs_again_collects_no_more_than_before() -> None:
    """As a profile runs it."""
    batch = {**batch_of("Llama"), "output_hidden_states": True}
    start, block, *_ = flatten(made("Llama"), batch)
    carried = start(**batch)
    sizes = [len(_pytree.tree_leaves(value)) for value in (block(carried), block(carried), carried)]
    assert sizes[0] == sizes[1] > sizes[2]


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "logits"])
@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_what_the_sample_did_not_ask_for_and_what_no_output_has_is_refused_by_name(
    name: str, flag: str, labelled: bool
) -> None:
    """The pipe would otherwise give an output, or a loss, without it."""
    batch = batch_of(name, labelled=labelled)
    refused = pytest.raises(ValueError, match=rf"{flag}=False.*model\.config.*parts")
    if not labelled:
        with refused:
            piped(made(name, **{flag: True}), batch)
        with refused:
            piped(made(name), {**batch, flag: True})
    model = made(name)
    pipe = piped(model, batch)
    calls = [pipe, pipe.step, pipe.evaluate] if labelled else [pipe]
    for call in calls:
        with refused:
            call(**batch, **{flag: True})
    setattr(model.config, flag, True)
    for call in calls:
        with refused:
            call(**batch)
    off = {**batch, flag: False}
    expected, found = model(**off), pipe(**off)
    torch.testing.assert_close(found.logits if labelled else found, expected.logits, rtol=1e-3, atol=1e-3)
    if labelled:
        torch.testing.assert_close(pipe.step(**off), expected.loss.detach(), rtol=1e-3, atol=1e-3)


def test_a_part_of_the_model_that_asks_by_a_configuration_of_its_own_is_refused_too() -> None:
    model, batch = made("T5"), batch_of("T5")
    pipe = piped(model, batch)
    model.encoder.config.output_hidden_states = True
    for call in (pipe, pipe.step):
        with pytest.raises(ValueError, match=r"output_hidden_states=False.*parts"):
            call(**batch)

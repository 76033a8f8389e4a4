"""Outputs collected inside blocks: hidden states, attentions, router logits and their balancing loss."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from gpipe import GPipe

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


def piped(model: nn.Module, **options: Any) -> GPipe:
    return GPipe(model, devices=["cpu"] * 2, chunks=3, **options)


def total(output: Any) -> Tensor:
    """Add to the model's loss one of everything else that it returns."""
    others = [each for each in _pytree.tree_leaves({**output}) if isinstance(each, Tensor) and each.requires_grad]
    return sum((each.square().mean() for each in others), output["loss"])  # type: ignore[return-value]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("name", "flag"), [*ROUTERS, *OTHERS])
def test_output_loss_and_gradients_match_plain_model(name: str, flag: str, checkpoint: str) -> None:
    by_argument = checkpoint == "never"
    model = made(name) if by_argument else made(name, **{flag: True})
    batch = {**batch_of(name), **({flag: True} if by_argument else {})}
    plain, pipe = copy.deepcopy(model), piped(model, checkpoint=checkpoint)
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
def test_small_balancing_loss_is_computed_once(name: str, coefficient: float, checkpoint: str) -> None:
    """It is a product of means over all tokens, so losses of micro-batches do not add up to it."""
    batch = batch_of(name)
    plain = made(name, output_router_logits=True)
    plain.router_aux_loss_coef = coefficient  # type: ignore[assignment]
    model = copy.deepcopy(plain)
    pipe = piped(model, checkpoint=checkpoint)
    expected = plain(**batch).loss
    expected.backward()
    for method in (pipe.step, pipe.evaluate):
        torch.testing.assert_close(method(**batch), expected.detach())
    assert pipe.last_schedule is not None
    assert pipe.last_schedule.name == "fill_drain"
    assert distance(gradients(model), gradients(plain)) < max(MODELS[name].tolerance, 1e-5)


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "logits"])
@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_outputs_can_be_requested_later(name: str, flag: str, labelled: bool) -> None:
    """Outputs are requested by an argument, or in the configuration."""
    batch, model = batch_of(name, labelled=labelled), made(name)
    plain, pipe = copy.deepcopy(model), piped(model)

    def expect_same(**asked: Any) -> None:
        expected, found = plain(**batch, **asked), pipe(**batch, **asked)
        torch.testing.assert_close({**found}, {**expected}, rtol=1e-3, atol=1e-3)
        if labelled:
            torch.testing.assert_close(pipe.step(**batch, **asked), expected.loss.detach(), rtol=1e-3, atol=1e-3)

    expect_same()
    expect_same(**{flag: True})
    for each in (model, plain):
        setattr(each.config, flag, True)
    expect_same()
    expect_same(**{flag: False})


def test_sub_config_can_request_outputs() -> None:
    model, batch = made("T5"), batch_of("T5")
    plain, pipe = copy.deepcopy(model), piped(model)
    for each in (model, plain):
        each.encoder.config.output_hidden_states = True
    torch.testing.assert_close({**pipe(**batch)}, {**plain(**batch)}, rtol=1e-6, atol=1e-6)

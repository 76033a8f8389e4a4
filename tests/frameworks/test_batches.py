"""Batches of tokenizers go into a step as they are, and give the loss and the gradients of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, BatchEncoding, GPT2Config, LlamaConfig  # noqa: E402

from gpipe import GPipe  # noqa: E402

CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "llama": LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
}


def padded() -> dict[str, torch.Tensor]:
    """Rows of different lengths, whose padding does not count."""
    tokens = torch.randint(1, 64, (7, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < torch.tensor([8, 3, 5, 8, 2, 6, 7])[:, None]
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def pair(family: str) -> tuple[nn.Module, nn.Module, GPipe]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).double()
    model.config.use_cache = False
    plain = copy.deepcopy(model)
    sample = {name: rows[:3] for name, rows in padded().items()}
    return plain, model, GPipe(model, devices=["cpu", "cpu"], chunks=3, sample=sample)


def assert_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    own = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        # The model computes its loss in single precision.
        torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize("counted", [False, True])
def test_it_is_the_loss_of_the_model(family: str, schedule: str, counted: bool) -> None:
    plain, model, pipe = pair(family)
    batch = padded()
    options = {"num_items_in_batch": int((batch["labels"][:, 1:] != -100).sum())} if counted else {}
    expected = plain(**batch).loss
    expected.backward()
    batch = {**batch, **options}
    for call in (
        lambda method, **more: method(**batch, **more),
        lambda method, **more: method(batch, **more),
        lambda method, **more: method(BatchEncoding(batch), **more),
    ):
        pipe.zero_grad()
        torch.testing.assert_close(call(pipe.evaluate), expected.detach())
        torch.testing.assert_close(call(pipe.step, schedule=schedule), expected.detach())
        assert_same_gradients(model, plain)


def test_a_loss_of_ones_own_with_metrics() -> None:
    plain, model, _ = pair("llama")
    batch = padded()
    labels = batch.pop("labels")
    pipe = GPipe(model, devices=["cpu", "cpu"], chunks=3, sample={name: rows[:3] for name, rows in batch.items()})

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        kept = labels[:, 1:] != -100
        losses = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        return losses, kept.sum(), {"tokens": kept.sum(1)}

    loss, metrics = pipe.step(batch, labels, loss_fn=loss_fn)
    expected = plain(**batch, labels=labels).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert metrics["tokens"].tolist() == [7, 2, 4, 7, 1, 5, 6]
    assert_same_gradients(model, plain)


def test_what_the_model_does_not_take_is_refused_by_name() -> None:
    _, _, pipe = pair("gpt2")
    with pytest.raises(TypeError, match=r"'los_fn' .* did you mean 'loss_fn'"):
        pipe.step(**padded(), los_fn=3)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_tuple_instead_of_names_is_returned_as_by_the_model_and_refused_as_a_loss(family: str) -> None:
    plain, _, pipe = pair(family)
    batch = padded()
    found, expected = pipe(**batch, return_dict=False), plain(**batch, return_dict=False)
    assert type(found) is tuple
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for method in (pipe.step, pipe.evaluate):
        with pytest.raises(TypeError, match="got a tuple; set return_dict=True"):
            method(**batch, return_dict=False)

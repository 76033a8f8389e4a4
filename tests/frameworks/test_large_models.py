"""Hugging Face models on the meta device, materialized by ``GPipe(init=...)``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import FAMILIES, ROWS

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*torch_dtype:UserWarning")]
# On meta, torch implements grouped products for bfloat16 only.
HALF = ("Mixtral",)


def pair(name: str, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return the model on meta, and a real one."""
    family = FAMILIES[name]
    family = family._replace(dtype=torch.bfloat16 if name in HALF else family.dtype)
    with torch.device("meta"):
        model = family.make(**settings)
    return model.eval(), family.make(**settings).eval()


def piped(model: nn.Module, init: Any, **options: Any) -> GPipe:
    return GPipe(model, devices=["cpu"] * 3, chunks=3, init=init, **options)


def result(output: Any) -> Tensor:
    return output["logits"] if "logits" in output else output["last_hidden_state"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_dict_makes_the_plain_model(name: str) -> None:
    family = FAMILIES[name]
    model, plain = pair(name)
    pipe = piped(model, plain.state_dict())
    assert set(pipe.state_dict()) == set(plain.state_dict())
    for key, value in {**plain.state_dict(), **dict(plain.named_buffers())}.items():
        torch.testing.assert_close({**model.state_dict(), **dict(model.named_buffers())}[key], value, msg=key)
    with torch.no_grad():
        expected = result(plain(**family.inputs(ROWS)))
        for found in (result(pipe(**family.inputs(ROWS))), result(model(**family.inputs(ROWS)))):
            tolerance = 0.1 if name in HALF else max(family.tolerance, 1e-9)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["GPT-2", "Gemma 3", "BERT", "Mamba", "T5"])
def test_reset_initialises_as_the_model_does(name: str) -> None:
    """The numbers are others, but what is constant, and how far the rest is spread, is the same."""
    model, plain = pair(name)
    pipe = piped(model, "reset")
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for key, expected in {**dict(plain.named_parameters()), **dict(plain.named_buffers())}.items():
        assert found[key].isfinite().all(), key
        if expected.numel() > 1 and expected.float().std() > 0 and isinstance(expected, nn.Parameter):
            assert 0.5 < found[key].float().std() / expected.float().std() < 2, key
        else:
            torch.testing.assert_close(found[key], expected, msg=key)
    assert result(pipe(**FAMILIES[name].inputs(ROWS))).isfinite().all()


@pytest.mark.parametrize("shard", ["5KB", "1GB"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_from_a_folder(shard: str, tied: bool, tmp_path: Path) -> None:
    model, plain = pair("Llama", tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "5KB")
    inputs = FAMILIES["Llama"].inputs(ROWS)
    batch = {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}
    pipe = GPipe(model, devices=["cpu", "cpu"], init=tmp_path, chunks=2)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    loss, expected = pipe.train().step(**batch), plain.train()(**batch).loss
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(pipe(**batch).logits, plain(**batch).logits)
    expected.backward()
    for (key, found), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad, msg=key)
    model.save_pretrained(tmp_path / "again")
    again = type(plain).from_pretrained(tmp_path / "again", dtype=torch.float64)
    torch.testing.assert_close(dict(again.state_dict()), dict(plain.state_dict()))

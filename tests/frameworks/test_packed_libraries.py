"""Adapters over weights that libraries quantize: a pipe trains, generates, saves and loads as the model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpipe import GPipe, check

from .families import transformers
from .pipelined import pipelined

peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.randint(2, 64, (6, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def by_hqq(model: nn.Module) -> None:
    quantize = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    config = quantize.BaseQuantizeConfig(nbits=4, group_size=64)
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, own = name.rpartition(".")
            packed = quantize.HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
            setattr(model.get_submodule(parent), own, packed)


def by_quanto(model: nn.Module) -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    quanto.quantize(model, weights=quanto.qint8, exclude="lm_head")
    quanto.freeze(model)


def by_torchao(model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    model.requires_grad_(False)


def made(quantize: Callable[[nn.Module], None]) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=4, num_attention_heads=4, pad_token_id=0, **sizes)
    )
    quantize(model)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("quantize", [by_hqq, by_quanto, by_torchao])
def test_as_the_model(quantize: Callable[[nn.Module], None], checkpoint: str) -> None:
    plain, model = made(quantize), made(quantize)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    with pipelined(pipe, 2, microbatches=3):
        loss = pipe.step(**BATCH)
    expected = plain(**BATCH).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for (name, one), (_, other) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, msg=name)
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in pipe.state_dict().items()
    }
    pipe.load_state_dict(state)
    pipe.eval(), plain.eval()
    torch.testing.assert_close(pipe.evaluate(**BATCH), expected.detach())
    ways = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(pipe.generate(TOKENS[:2], **ways), plain.generate(TOKENS[:2], **ways))
    assert check(plain, BATCH).ok
    if quantize is not by_quanto:  # whose weights no deepcopy takes
        torch.testing.assert_close(copy.deepcopy(pipe).evaluate(**BATCH), expected.detach())

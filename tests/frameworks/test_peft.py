"""LoRA adapters of ``peft``, put in before a pipe is made or afterwards."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import FAMILIES
from .pipelined import pipelined

peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")

pytestmark = [pytest.mark.filterwarnings("ignore")]


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).double().train()


def batch(rows: int = 4) -> dict[str, Tensor]:
    found = FAMILIES["Llama"].inputs(rows)
    return {**found, "labels": found["input_ids"]}


def pipe_of(model: nn.Module, checkpoint: str = "always") -> GPipe:
    return GPipe(model, devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)


def train(called: nn.Module, tuned: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], 0.05)
    with pipelined(called, 2) if isinstance(called, GPipe) else nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            called(**batch())["loss"].backward()
            optimizer.step()


@pytest.fixture
def expected() -> Any:
    model = adapted(FAMILIES["Llama"].make())
    train(model, model)
    return model


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_before(checkpoint: str, expected: nn.Module) -> None:
    tuned = adapted(FAMILIES["Llama"].make())
    frozen = {name: p.clone() for name, p in tuned.named_parameters() if not p.requires_grad}
    pipe = pipe_of(tuned, checkpoint)
    train(pipe, tuned)
    assert_same(tuned, expected)
    assert all(torch.equal(p, frozen[name]) for name, p in tuned.named_parameters() if name in frozen)
    assert pipe.state_dict().keys() == tuned.state_dict().keys()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_of_parameters(checkpoint: str, schedule: str) -> None:
    """Each forward of a layer sets a parametrization, inside ``parametrize.cached()``, and removes it."""
    names = ["self_attn.q_proj.weight", "mlp.up_proj.weight"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)

    def tuned() -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(FAMILIES["Llama"].make(), config).double().train()

    found, plain = tuned(), tuned()
    train(plain, plain)
    pipe = GPipe(found, devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    optimizer = torch.optim.AdamW([p for p in found.parameters() if p.requires_grad], 0.05)
    with pipelined(pipe, 1, microbatches=4):
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(**batch(), schedule=schedule)
            optimizer.step()
    assert_same(found, plain)


@pytest.mark.parametrize("runs", [0, 1])
def test_afterwards(runs: int, expected: nn.Module) -> None:
    """Adapters are added to modules inside layers, which the pipe and the model share."""
    model = FAMILIES["Llama"].make()
    pipe = pipe_of(model)
    for _ in range(runs):
        pipe(**batch())["loss"].backward()
    model.zero_grad()
    tuned = adapted(model)
    train(pipe, tuned)
    assert_same(tuned, expected)


def test_the_adapter_alone_is_saved(tmp_path: Path, expected: nn.Module) -> None:
    tuned = adapted(FAMILIES["Llama"].make())
    train(pipe_of(tuned), tuned)
    tuned.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 50_000
    again = peft.PeftModel.from_pretrained(FAMILIES["Llama"].make(), tmp_path).double()
    torch.testing.assert_close(again(**batch())["loss"], expected(**batch())["loss"])


def test_merging(expected: nn.Module) -> None:
    """Merged weights are in the model, and so in the pipe."""
    tuned = adapted(FAMILIES["Llama"].make())
    pipe = pipe_of(tuned)
    train(pipe, tuned)
    merged = tuned.merge_and_unload()
    plain = copy.deepcopy(expected).merge_and_unload()
    assert_same(merged, plain)
    torch.testing.assert_close(pipe(**batch())["loss"], plain(**batch())["loss"])
    fresh = pipe_of(merged)
    torch.testing.assert_close(fresh(**batch())["loss"], plain(**batch())["loss"])

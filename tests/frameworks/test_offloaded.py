"""Models that accelerate has dispatched, or offloaded to host or disk: hooks come off, stages load the weights."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe import GPipe

from .families import transformers
from .pipelined import pipelined

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; see nox -s frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.randint(2, 64, (6, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
OUTSIDE = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
HOST = torch.device("cpu")


def made(*, tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": tied}
    config = transformers.LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **sizes)
    return transformers.LlamaForCausalLM(config)


def placed(place: str) -> dict[str, str]:
    """Everything but the first block at ``place``."""
    blocks = {f"model.layers.{k}": place if k else "cpu" for k in range(4)}
    return {**dict.fromkeys(OUTSIDE, "cpu"), **blocks}


def from_disk(model: Any) -> Any:
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, device_map=placed("disk"), offload_folder=tempfile.mkdtemp())


WAYS: dict[str, Callable[[Any], Any]] = {
    "dispatched": lambda model: accelerate.dispatch_model(model, placed("cpu"), force_hooks=True),
    "cpu_offload": lambda model: accelerate.cpu_offload(model, execution_device=HOST),
    "disk_offload": lambda model: accelerate.disk_offload(model, tempfile.mkdtemp(), execution_device=HOST),
    "buffers": lambda model: accelerate.cpu_offload(model, execution_device=HOST, offload_buffers=True),
    "device_map": from_disk,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_trains_as_the_plain_model(way: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain, model = made(tied=tied), WAYS[way](made(tied=tied)).train()
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=3)
    assert not [name for name, module in model.named_modules() if {"_hf_hook", "forward"} & vars(module).keys()]
    with pipelined(pipe, 2, microbatches=3):
        loss = pipe.step(**BATCH)
    expected = plain(**BATCH).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert grads.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)

"""Libraries that patch torch or transformers, or register operators: a pipe trains as the model after their import.

Each runs in a process of its own, because an import cannot be undone. Some patch what the pipe reads at its own import,
so each is imported before gpipe, and after it.
"""

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe import GPipe

from .families import FAMILIES
from .pipelined import pipelined

NEIGHBOURS = {
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "einops": "einops.layers.torch, einops._torch_specific",
    "fairscale": "fairscale.nn",
    "flash-linear-attention": "fla.layers, fla.models",
    "hqq": "hqq.core.quantize",
    "lightning": "lightning",
    "liger": "liger_kernel.transformers",
    "optimum-quanto": "optimum.quanto",
    "peft": "peft",
    "timm": "timm",
    "torchao": "torchao, torchao.quantization, torchao.float8",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision.ops",
    "trl": "trl",
    "unsloth": "unsloth_zoo",
    "xformers": "xformers.ops",
}
"""The modules that each imports."""

ROOT = Path(__file__).parents[2]
LIMIT = 250
"""Seconds for a process."""
USE = "import tests.frameworks.test_neighbours as here; here.smoke()"
ORDERS = {"before": "import {modules}; import gpipe; {use}", "after": "import gpipe; import {modules}; {use}"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_pipe_trains_as_the_model_next_to(name: str, order: str) -> None:
    package = NEIGHBOURS[name].split(",")[0].split(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{name} is not installed")
    run = in_a_process(ORDERS[order].format(modules=NEIGHBOURS[name], use=USE))
    if run.returncode:
        alone = in_a_process(f"import {NEIGHBOURS[name]}")
        if alone.returncode:
            pytest.skip(f"{name} cannot be imported here: {alone.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr[-4000:]
    assert "equal" in run.stdout, run.stdout


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def smoke() -> None:
    """A row of layers, two families of transformers and attention: one step each, in workers, equal to the model's."""
    torch.manual_seed(0)
    row = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 3))
    x, y = torch.randn(6, 6), torch.arange(6) % 3
    plain = copy.deepcopy(row)
    F.cross_entropy(plain(x), y).backward()
    for checkpoint in ("never", "always"):
        pipe = GPipe(copy.deepcopy(row), [2, 3], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
        with pipelined(pipe, 2, microbatches=3):
            pipe.step(x, target=y, loss_fn=F.cross_entropy)
        expect_equal(pipe, plain)
    for name in ("Llama", "GPT-2"):
        family = FAMILIES[name]
        batch: dict[str, Any] = family.inputs(6)
        batch["labels"] = batch["input_ids"]
        model = family.make()
        before = copy.deepcopy(model)
        before(**batch).loss.backward()
        pipe = GPipe(model, devices=["cpu"] * 2, chunks=3, checkpoint="always")
        with pipelined(pipe, 2, microbatches=3):
            pipe.step(**batch)
        expect_equal(pipe, before)
        pipe.zero_grad()
        with pipelined(pipe, 2, microbatches=3):
            pipe(**batch).loss.backward()
        expect_equal(pipe, before)
    print("equal")


def expect_equal(pipe: nn.Module, plain: nn.Module) -> None:
    found = [each.grad for each in pipe.parameters()]
    torch.testing.assert_close(found, [each.grad for each in plain.parameters()])

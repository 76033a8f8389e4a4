"""The time and memory to plan a model like Llama 70B, on the meta device, for hypothetical devices."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe

from .report import Report, Table

LAYERS, WIDTH, INNER, HEADS, GROUPS, WORDS = 80, 8192, 28672, 64, 8, 128256
TOKENS, ROWS = 4096, 64
CASES = (("8x80GB", "adam"), ("8x80GB", "sgd"), ("16x80GB", "adam"))
Figures = dict[str, float | str]


class Block(nn.Module):
    """A block of Llama, without positions, which cost next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.output = _linear(WIDTH, WIDTH), _linear(WIDTH, WIDTH)
        self.key, self.value = (_linear(WIDTH, GROUPS * WIDTH // HEADS) for _ in range(2))
        self.gate, self.up, self.down = _linear(WIDTH, INNER), _linear(WIDTH, INNER), _linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        heads = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in self._heads)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.output(seen.transpose(1, 2).flatten(2))
        y = self.between(x)
        inner: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + inner

    @property
    def _heads(self) -> list[nn.Module]:
        return [self.query, self.key, self.value]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def model() -> nn.Sequential:
    """Return the layers, with 70.6 · 10⁹ bfloat16 parameters, on the meta device."""
    with torch.device("meta"):
        blocks = [Block() for _ in range(LAYERS)]
        layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.RMSNorm(WIDTH), _linear(WIDTH, WORDS))
    return layers.to(torch.bfloat16)


def large(quick: bool) -> Report:
    """Seconds of a processor and resident memory of a process that imports torch, makes the model, and plans."""
    caption = f"A model like Llama 70B on meta, {ROWS} rows of {TOKENS} tokens: a process that does nothing but plan"
    table = Table("plan.md", "large", caption, ("devices", "optimizer", "found", "seconds", "peak memory"), left=3)
    figures = {}
    for devices, optimizer in CASES[:1] if quick else CASES:
        found = measured(devices, optimizer)
        seconds, memory = float(found["seconds"]), float(found["bytes"])
        table.add(devices, optimizer, found["found"], f"{seconds:.0f}", f"{memory / 1e9:.2f} GB")
        figures |= {f"plan, Llama 70B {devices} {optimizer}: seconds": seconds}
        figures |= {f"plan, Llama 70B {devices} {optimizer}: bytes": memory}
    return Report([table], figures)


def measured(devices: str, optimizer: str) -> Figures:
    """Plan once in a fresh process, and return the figures it reports."""
    code = f"from benchmarks.large_model import report; report({devices!r}, {optimizer!r})"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=900, check=True
    )
    found: Figures = json.loads(ended.stdout)
    return found


def _plan(devices: str, optimizer: str) -> str:
    sample = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    try:
        plan = gpipe.plan(model(), sample, devices, optimizer=optimizer)
    except gpipe.Infeasible as error:
        return f"does not fit: needs {error.changes[-1].partition(' (')[2].rstrip(')')}"
    return f"{len(plan.devices)} × {plan.chunks}, {plan.schedule}"


def report(devices: str, optimizer: str) -> None:
    """Plan once and print what was found, the seconds of a processor, and the most bytes of memory, as JSON."""
    found = _plan(devices, optimizer)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"found": found, "seconds": time.process_time(), "bytes": peak}))

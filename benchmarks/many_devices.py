"""The table of docs/howto/many-devices.md: a model like Llama 70B, planned for 8 to 10,240 devices that are not there.

python -m benchmarks.many_devices            # writes it anew
python -m benchmarks.many_devices 8 512      # these lines only
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from profiler import Profile, profile
from profiler.text import format_bytes, format_seconds, format_share

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "many-devices.md"
HEAD = """\
| devices | replicas × stages × micro-batches | rows of each | recompute | a step | rows/s of a device | bubble | average of gradients | fullest device |
|---:|---|---:|---|---:|---:|---:|---:|---:|"""  # noqa: E501 — a line of the page
MADE_WITH = "Made with torch"

LAYERS, WIDTH, INNER, HEADS, GROUPS, WORDS = 80, 8192, 28672, 64, 8, 128256
TOKENS, ROWS = 4096, 5120
NODES = {8: 1, 64: 8, 512: 64, 4096: 512, 10240: 1280}
LINKS = {"bandwidth": ["450GB", "400Gbit"], "latency": [5e-6, 1e-5]}
"""What a data sheet says of an H100 with NVLink, and one port of 400 Gbit/s for each device."""


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
    """The layers, of 70.6 · 10⁹ parameters in bfloat16, without data."""
    with torch.device("meta"):
        blocks = [Block() for _ in range(LAYERS)]
        layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.RMSNorm(WIDTH), _linear(WIDTH, WORDS))
    return layers.to(torch.bfloat16)


def batch() -> Tensor:
    """A mini-batch, without data."""
    return torch.empty(ROWS, TOKENS, dtype=torch.long, device="meta")


@cache
def counted() -> tuple[nn.Sequential, Profile]:
    """The model, and what its layers take by the row, which is the same for any number of devices."""
    layers = model()
    return layers, profile(layers, batch(), device="meta", rows=[1, ROWS // min(NODES)])


def row(devices: int) -> str:
    """The line of the table for so many devices."""
    layers, known = counted()
    nodes = NODES[devices]
    try:
        cells = _cells(gpipe.plan(layers, batch(), f"{nodes}x{devices // nodes}xH100", profile=known, **LINKS))
    except gpipe.Infeasible as error:
        cells = [f"does not fit: {format_bytes(error.short)} short on a device", *[""] * 7]
    return f"| {devices} | {' | '.join(cells)} |".replace("  ", " ")


def _cells(plan: gpipe.Plan) -> list[str]:
    devices = plan.replicas * len(plan.balance)
    every = plan.checkpoint.count("always")
    return [
        f"{plan.replicas} × {len(plan.balance)} × {plan.chunks}",
        str(plan.rows // plan.replicas),
        f"{every} of {len(plan.balance)} stages",
        format_seconds(plan.predicted.seconds.mid),
        f"{plan.predicted.throughput / devices:.3f}",
        format_share(plan.predicted.bubble),
        format_seconds(plan.reduction),
        format_bytes(max(need.total for need in plan.predicted.bytes)),
    ]


def rows(page: str) -> dict[int, str]:
    """The lines of the table as printed, by devices."""
    table = page.partition(HEAD + "\n")[2].partition("\n\n")[0]
    return {int(line.split("|")[1]): line for line in table.splitlines()}


def write(numbers: Iterable[int] = ()) -> None:
    """Plan for these numbers of devices, or all, and put their lines into the page."""
    lines = rows(PAGE.read_text(encoding="utf-8"))
    for devices in numbers or NODES:
        lines[devices] = row(devices)
        sys.stderr.write(lines[devices] + "\n")
    table = "\n".join([HEAD, *(lines[devices] for devices in sorted(lines))])
    page = re.sub(
        r"^\| devices \|.*?(?=\n\n)", lambda _: table, PAGE.read_text(encoding="utf-8"), count=1, flags=_BLOCK
    )
    page = re.sub(rf"{MADE_WITH} [\d.]+\d", f"{MADE_WITH} {version()}", page)
    PAGE.write_text(page, encoding="utf-8")


def version() -> str:
    """Of torch, whose operations decide what is counted."""
    return torch.__version__.partition("+")[0]


_BLOCK = re.DOTALL | re.MULTILINE

if __name__ == "__main__":
    write([int(text) for text in sys.argv[1:]])

"""A model like Llama 70B, planned for 8 to 10,240 devices that are not there: the table of docs/howto/many-devices.md.

And what it takes to plan one without data.

python -m benchmarks.many_devices            # writes the table anew
python -m benchmarks.many_devices 8 512      # these lines only
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from profiler import Profile, profile
from profiler.text import format_bytes, format_seconds, format_share

from .report import Report, Table

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "many-devices.md"
HEAD = """\
| devices | replicas × devices × micro-batches, schedule | rows of each | recompute | a step | rows/s of a device | bubble | average of gradients | fullest device |
|---:|---|---:|---|---:|---:|---:|---:|---:|"""  # noqa: E501 — a line of the page
MADE_WITH = "Made with torch"

LAYERS, WIDTH, INNER, HEADS, GROUPS, WORDS = 80, 8192, 28672, 64, 8, 128256
TOKENS, ROWS = 4096, 5120
NODES = {8: 1, 64: 8, 512: 64, 4096: 512, 10240: 1280}
LINKS = {"bandwidth": ["450GB", "50GB"], "latency": [5e-6, 1e-5]}
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
    devices = plan.replicas * len(plan.devices)
    every, some = plan.checkpoint.count("always"), sum(isinstance(each, list) for each in plan.checkpoint)
    partly = f", {some} in part" if some else ""
    return [
        f"{plan.replicas} × {len(plan.devices)} × {plan.chunks}, {plan.schedule}",
        str(plan.rows // plan.replicas),
        f"{every} of {len(plan.balance)} stages{partly}",
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

FEW_ROWS = 64
CASES = (("8x80GB", "adam"), ("8x80GB", "sgd"), ("16x80GB", "adam"), ("8x8x80GB", "adam"))
Figures = dict[str, float | str]


def large(quick: bool) -> Report:
    """Seconds of a processor and resident memory of a process that imports torch, makes the model, and plans."""
    caption = (
        f"A model like Llama 70B on meta, {FEW_ROWS} rows of {TOKENS} tokens: a process that does nothing but plan"
    )
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
    """What a process that plans once says of itself."""
    code = f"from benchmarks.many_devices import report; report({devices!r}, {optimizer!r})"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=900, check=True
    )
    found: Figures = json.loads(ended.stdout)
    return found


def _plan(devices: str, optimizer: str) -> str:
    sample = torch.zeros(FEW_ROWS, TOKENS, dtype=torch.long)
    try:
        plan = gpipe.plan(model(), sample, devices, optimizer=optimizer)
    except gpipe.Infeasible as error:
        return f"does not fit: needs {error.changes[-1].partition(' (')[2].rstrip(')')}"
    return f"{plan.replicas} × {len(plan.devices)} × {plan.chunks}, {plan.schedule}"


def report(devices: str, optimizer: str) -> None:
    """Plan once and print what was found, the seconds of a processor, and the most bytes of memory, as JSON."""
    found = _plan(devices, optimizer)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"found": found, "seconds": time.process_time(), "bytes": peak}))


if __name__ == "__main__":
    write([int(text) for text in sys.argv[1:]])

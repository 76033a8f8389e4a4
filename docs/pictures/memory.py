"""Draw docs/pictures/memory.svg: what each device holds of the digits example, measured by its own code.

python docs/pictures/memory.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from _svg import BACKWARD, DARK, FORWARD, GROUND, INK, PAPER, rect, text

from gpipe import GPipe
from profiler.text import format_bytes

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "examples"))

if TYPE_CHECKING:
    from _compare import Held

STAGES, CHUNKS, BATCH = 4, 16, 256
LEFT, WIDTH, RIGHT, TOP, BAR, GAP = 168.0, 400.0, 124.0, 62.0, 11.0, 12.0

# Attributes hold the light colours, which every viewer draws; rules of CSS win over attributes where they apply.
STYLE = "".join(f'[fill="{light}"] {{ fill: {dark} }}\n' for light, dark in DARK.items())


def main() -> None:
    measured = measure()
    (HERE / "memory.svg").write_text(picture(measured), encoding="utf-8")
    whole = measured["plain model"][0].total
    for way, devices in measured.items():
        print(way, *(format_bytes(held.total) for held in devices), f"{max(h.total for h in devices) / whole:.0%}")


def measure() -> dict[str, list[Held]]:
    from _compare import MiniBatch, memory
    from digits import fit, load, network

    torch.manual_seed(0)
    (images, labels), _ = load()
    model = network(16)
    plain = copy.deepcopy(model)
    # A fixed balance, so that the picture is the same on every machine.
    pipe = GPipe(model, [3, 3, 3, 3], devices=["cpu"] * STAGES, chunks=CHUNKS, checkpoint="never")
    alone = GPipe(plain, [len(plain)], devices=["cpu"], checkpoint="never")
    optimizer = fit(pipe, (images[:BATCH], labels[:BATCH]), epochs=2, batch=BATCH)
    task = MiniBatch(images[:BATCH], labels[:BATCH], F.cross_entropy)
    task.loss(plain).backward()  # else gradients would be born in the step that is measured, and counted as kept
    found = memory(alone, pipe, optimizer, task)
    pipe.close()
    alone.close()
    return found


def picture(measured: dict[str, list[Held]]) -> str:
    """Bars for all devices, way below way: states, and behind them activations."""
    most = max(held.total for devices in measured.values() for held in devices)
    body, y = [], TOP
    for way, devices in measured.items():
        body += bars(way, devices, measured["plain model"][0].total, WIDTH / most, y)
        y += len(devices) * BAR + GAP
    width, height = LEFT + WIDTH + RIGHT, y + 4
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" fill="{INK}" font-size="11" '
        f'font-family="ui-sans-serif, system-ui, sans-serif">'
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{STYLE}}}</style>"
    paper = f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>'
    return "\n".join([opening, style, paper, *heading(), *body, "</svg>", ""])


def heading() -> Iterator[str]:
    title = f"Bytes that a device holds at most: a residual network on {STAGES} devices, {CHUNKS} micro-batches"
    yield text(16, 22, title, anchor="start", size=13, bold=True)
    yield rect(LEFT, 36, 10, 10, BACKWARD)
    yield text(LEFT + 15, 45, "parameters, gradients, optimizer", anchor="start")
    yield rect(LEFT + 226, 36, 10, 10, FORWARD)
    yield text(LEFT + 241, 45, "activations at their peak", anchor="start")


def bars(way: str, devices: Sequence[Held], whole: int, scale: float, y: float) -> Iterator[str]:
    height = len(devices) * BAR
    worst = max(held.total for held in devices)
    yield text(LEFT - 10, y + height / 2 + 4, way, anchor="end")
    for device, held in enumerate(devices):
        top, states = y + device * BAR, held.states * scale
        title = f"{way}, device {device}: {format_bytes(held.total)}"
        yield rect(LEFT, top, WIDTH, BAR - 1.5, GROUND)
        yield rect(LEFT, top, states, BAR - 1.5, BACKWARD, title)
        yield rect(LEFT + states, top, held.activations * scale, BAR - 1.5, FORWARD, title)
    x = LEFT + WIDTH + 8
    yield text(x, y + height / 2 + 4, f"{format_bytes(worst)}, {worst / whole:.0%}", anchor="start", bold=True)


if __name__ == "__main__":
    main()

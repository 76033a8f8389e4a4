"""The scenarios by name: schedules, checkpointing, skips, tied weights, random numbers, and custom forwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from packages.streams.tests.interleavings.programs import WORKERS
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..layers import DOUBLE, Layer, Pop, Row, Stash, Tied, counted, linear, squares
from .scenarios import Point, Scenario, model_of, point, points
from .several import SEVERAL


def tied() -> nn.Sequential:
    """Return three stages. The first and the last share their weight."""
    first, middle = linear(), linear()
    return nn.Sequential(first, Point("stage 0", 0), middle, Point("stage 1", 1), Tied(first), Point("stage 2", 2))


def skips() -> nn.Sequential:
    first, middle, last = (Point(f"stage {j}", j) for j in range(3))
    return nn.Sequential(linear(), Stash(), first, linear(), middle, Pop(), linear(), last)


class Noise(nn.Module):
    """A layer that uses torch's RNG."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


class PythonNoise(nn.Module):
    """A layer that uses Python's RNG."""

    def forward(self, x: Tensor) -> Tensor:
        point("before a number")
        return x * random.random()


class Attention(nn.Module):
    """Attention that selects its own kernel."""

    def __init__(self, kernel: SDPBackend) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(*[x[:, None, None]] * 3)[:, 0, 0]


def row(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that creates a model with a custom forward and these blocks."""
    create = model_of(*layers)
    return lambda: Row(*create())


def part(k: int, stage: int | None = None) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(linear(), Point(f"block {k}", k if stage is None else stage))


class Between(Row):
    """A model that computes between its blocks and after them."""

    def forward(self, x: Any) -> Any:
        first, last = self.layers
        y = first(x).tanh()
        return last(y + x).sin() * 2


def between() -> nn.Module:
    return Between(*row(part(0), part(1))().layers)


def blocks(count: int) -> dict[str, Any]:
    return {"blocks": [f"layers.{k}" for k in range(count)]}


def scenarios() -> list[Scenario]:
    found = []
    for schedule in ("fill_drain", "1f1b", "zero_bubble", None, "evaluate"):
        name = {None: "call"}.get(schedule, schedule)
        two, three = (points(stages, backward=schedule != "zero_bubble") for stages in (2, 3))
        found.append(Scenario(f"{name}", two, (2, 2), schedule, {}))
        found.append(Scenario(f"{name}-3-stages", three, (2, 2, 2), schedule, {"chunks": 3}, count=3))
    for mode in ("always", "except_last"):
        for schedule in ("1f1b", "zero_bubble", None):
            two = points(2, backward=schedule != "zero_bubble")
            found.append(Scenario(f"{schedule or 'call'}-{mode}", two, (2, 2), schedule, {"checkpoint": mode}))
    two = points(2)
    looped = {"devices": [torch.device("cpu", j % 2) for j in range(4)]}
    for schedule in ("interleaved", "interleaved_zero_bubble"):
        four = points(4, backward=schedule == "interleaved")
        found.append(Scenario(schedule, four, (2, 2, 2, 2), schedule, looped))
    found.append(
        Scenario(
            "zbv",
            points(4, backward=False),
            (2, 2, 2, 2),
            "zbv",
            {"devices": [torch.device("cpu", j) for j in (0, 1, 1, 0)]},
        )
    )
    for schedule in ("1f1b", None):
        name = schedule or "call"
        found.append(Scenario(f"{name}-skips", model_of_layers(skips), (3, 2, 3), schedule, {}))
        found.append(Scenario(f"{name}-tied", model_of_layers(tied), (2, 2, 2), schedule, {}))
        found.append(Scenario(f"{name}-offload", two, (2, 2), schedule, {"offload": True}))
        noise = model_of(linear, Noise, lambda: Point("stage 0", 0), linear, Noise, lambda: Point("stage 1", 1))
        found.append(Scenario(f"{name}-noise", noise, (3, 3), schedule, {"checkpoint": "always"}, draws=True))
        attention = model_of(
            linear, lambda: Attention(SDPBackend.MATH), linear, lambda: Attention(SDPBackend.FLASH_ATTENTION)
        )
        found.append(Scenario(f"{name}-attention", attention, (2, 2), schedule, {}))
        found.append(Scenario(f"{name}-model", row(part(0), part(1)), (1, 1), schedule, blocks(2)))
        found.append(Scenario(f"{name}-between", between_model, (1, 1), schedule, blocks(2)))
        found.append(
            Scenario(
                f"{name}-model-always", row(part(0), part(1)), (1, 1), schedule, {**blocks(2), "checkpoint": "always"}
            )
        )
        drawing = row(part(0), PythonNoise, part(2, 1), PythonNoise)
        found.append(Scenario(f"{name}-model-noise", drawing, (2, 2), schedule, blocks(4), draws=True))
    found.append(Scenario("1f1b-counted", two, (2, 2), "1f1b", {}, loss_fn=counted))
    found.append(Scenario("evaluate-model", row(part(0), part(1)), (1, 1), "evaluate", blocks(2)))
    found.append(Scenario("1f1b-inline", two, (2, 2), "1f1b", {}, inline=True))
    found.append(Scenario("1f1b-all-rows", two, (2, 2), "1f1b", {}, loss_fn=lambda *each: squares(*each)))
    found.append(Scenario("1f1b-4-micro-batches", two, (2, 2), "1f1b", {"chunks": 4}))
    found.append(Scenario("1f1b-one-device", points(3), (2, 2, 2), "1f1b", {"devices": [torch.device("cpu", 0)] * 3}))
    return found


def large() -> list[Scenario]:
    """Four stages and eight micro-batches: too many orders to enumerate, so random priorities are tried instead."""
    found = []
    eight: dict[str, Any] = {"chunks": 8}
    for schedule in ("fill_drain", "1f1b", "zero_bubble", None, "evaluate"):
        four = points(4, backward=schedule != "zero_bubble")
        found.append(Scenario(f"large-{schedule or 'call'}", four, (2,) * 4, schedule, eight, count=8))
    for schedule, order in (("interleaved", (0, 1, 0, 1)), ("zbv", (0, 1, 1, 0))):
        four = points(4, backward=schedule == "interleaved")
        placed = {**eight, "devices": [torch.device("cpu", j) for j in order]}
        found.append(Scenario(f"large-{schedule}", four, (2,) * 4, schedule, placed, count=8))
    always = {**eight, "checkpoint": "always"}
    found.append(Scenario("large-1f1b-always", points(4), (2,) * 4, "1f1b", always, count=8))
    model = row(*(part(k) for k in range(4)))
    for schedule in ("1f1b", None):
        name = f"large-{schedule or 'call'}-model"
        found.append(Scenario(name, model, (1,) * 4, schedule, {**eight, **blocks(4)}, count=8))
    return found


def model_of_layers(create: Callable[[], nn.Sequential]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return create()

    return model


between_model = model_of_layers(between)  # type: ignore[arg-type]
LARGE: dict[str, Callable[[], None]] = {each.name: each for each in large()}
PROGRAMS: dict[str, Callable[[], None]] = {each.name: each for each in scenarios()} | SEVERAL | WORKERS | LARGE
ORDERS_ONLY = frozenset({"nested-seeds", "two-seeds"})
"""Programs without injected failures and interrupts, because each of their threads must return a result."""
__all__ = ["DOUBLE", "ORDERS_ONLY", "PROGRAMS", "Layer"]

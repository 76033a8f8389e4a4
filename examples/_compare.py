"""Code shared by the examples: options, and comparisons of a pipeline with the plain model."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gpipe import GPipe, Timeline, record
from gpipe.skip import Namespace, Skippable

console = Console()

WAYS = {
    "fill-drain": ("fill_drain", "never"),
    "1F1B": ("1f1b", "never"),
    "fill-drain, checkpointed": ("fill_drain", "always"),
    "1F1B, checkpointed": ("1f1b", "always"),
}
"""Schedule and checkpointing mode, by name in the tables."""


class Task(Protocol):
    """A mini-batch and its loss."""

    def loss(self, model: nn.Module) -> Tensor:
        """The loss that the model has on the mini-batch, to go backward from."""

    def step(self, pipe: GPipe, schedule: str) -> Tensor:
        """Forward and backward by a schedule; the loss, detached."""


@dataclass(frozen=True)
class MiniBatch:
    """Inputs, targets, and a loss function like PyTorch's; ``reduction`` states how losses of micro-batches add up."""

    inputs: Tensor
    targets: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    reduction: str | None = None

    def loss(self, model: nn.Module) -> Tensor:
        output = model(self.inputs.to(next(model.parameters()).device))
        return self.loss_fn(output, self.targets.to(output.device))

    def step(self, pipe: GPipe, schedule: str) -> Tensor:
        loss: Tensor = pipe.step(
            self.inputs, self.targets, loss_fn=self.loss_fn, reduction=self.reduction, schedule=schedule
        )
        return loss


def parser(description: str | None, timeline: str, *, stages: int = 2, chunks: int = 8) -> argparse.ArgumentParser:
    """The options that all examples take; ``timeline`` is the name of the file with the drawing."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = ["cpu"] * stages
    options.add_argument("--devices", nargs="+", default=devices, help=f"one per stage (default: {' '.join(devices)})")
    options.add_argument("--chunks", type=int, default=chunks, help="micro-batches a mini-batch is cut into")
    options.add_argument(
        "--timeline",
        type=Path,
        default=Path(tempfile.gettempdir()) / timeline,
        help="where to save the drawing of a step: .svg or .html (default: %(default)s)",
    )
    return options


def isolated(layer: nn.Module, space: Namespace) -> nn.Module:
    """The layer with its skips in a namespace; what ``@skippable`` adds to a class is unknown to type checkers."""
    assert isinstance(layer, Skippable)
    layer.isolate(space)
    return layer


def compare_results(
    plain: nn.Module, pipe: GPipe, task: Task, measures: Mapping[str, Callable[[nn.Module], str]]
) -> None:
    """Print what the trained model achieves, and a mini-batch's loss and gradients, without and with the pipeline."""
    plain.load_state_dict(pipe.state_dict())
    table = Table("", "plain model", "pipeline", title="The same parameters, without and with the pipeline")
    for name, measure in measures.items():
        table.add_row(name, measure(plain), measure(pipe))
    for model in (plain, pipe):
        model.zero_grad()
    loss = task.loss(plain)
    loss.backward()
    table.add_row("loss of a mini-batch", f"{loss.item():.5f}", f"{task.step(pipe, '1f1b').item():.5f}")
    table.add_row("its gradients differ by at most", "", f"{difference(plain, pipe):.0e} of the largest")
    console.print(table, "")


def difference(plain: nn.Module, pipe: GPipe) -> float:
    """Return the largest difference of any gradient from the plain model's, relative to the largest gradient."""
    found, expected = gradients(pipe), gradients(plain)
    largest = max(grad.abs().max().item() for grad in expected.values())
    return max((found[name] - grad).abs().max().item() for name, grad in expected.items()) / largest


def gradients(model: nn.Module) -> dict[str, Tensor]:
    tensors = model.state_dict(keep_vars=True)  # the names of the plain model, for all wrappers
    return {name: tensor.grad.cpu() for name, tensor in tensors.items() if tensor.grad is not None}


class Held(NamedTuple):
    """Bytes that a device holds: of parameters with gradients and optimizer, and of activations at their peak."""

    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations


def compare_memory(alone: GPipe, pipe: GPipe, optimizer: torch.optim.Optimizer, task: Task) -> None:
    """Print what each device holds at most; ``alone`` is the plain model, on one device and in one piece."""
    measured = memory(alone, pipe, optimizer, task)
    (whole,) = measured["plain model"]
    table = Table(title="What a device holds at most")
    for heading in ("", *(f"device {stage}" for stage in range(len(pipe.partitions))), "of plain model"):
        table.add_column(heading, justify="right")
    for way, devices in measured.items():
        cells = [mebibytes(held.total) for held in devices] + [""] * (len(pipe.partitions) - len(devices))
        table.add_row(way, *cells, f"{max(held.total for held in devices) / whole.total:.0%}")
    console.print(table)
    states = ", ".join(mebibytes(held.states) for held in measured["1F1B"])
    console.print(f"Of this, parameters with gradients and optimizer: {states}.\n")


def memory(alone: GPipe, pipe: GPipe, optimizer: torch.optim.Optimizer, task: Task) -> dict[str, list[Held]]:
    """Return the measured peaks of each device: the plain model's, then the pipeline's for each setting."""
    states = [bytes_of_training(partition, optimizer) for partition in pipe.partitions]
    found = {"plain model": [Held(sum(states), peak) for peak in peaks(alone, task, "fill_drain")]}
    before = pipe.checkpoint
    for way, (schedule, pipe.checkpoint) in WAYS.items():
        found[way] = [Held(*pair) for pair in zip(states, peaks(pipe, task, schedule), strict=True)]
    pipe.checkpoint = before
    return found


def bytes_of_training(stage: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a stage's parameters, their gradients and optimizer state."""
    tensors = [
        tensor
        for parameter in stage.parameters()
        for tensor in (parameter, parameter.grad, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, Tensor)
    ]
    return sum(tensor.nbytes for tensor in tensors)


def peaks(pipe: GPipe, task: Task, schedule: str) -> list[int]:
    """Bytes of activations that each stage holds at most during a step."""
    with record(memory=True) as timeline:
        task.step(pipe, schedule)
    assert timeline.peak_bytes is not None
    return [timeline.peak_bytes[stage] for stage in range(len(pipe.partitions))]


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def draw(pipe: GPipe, task: Task, path: Path, steps: int = 8) -> None:
    """Save a drawing of a step: the fastest of several, since the first is slower, and others may be disturbed."""
    timeline = min((recorded(pipe, task) for _ in range(steps)), key=lambda timeline: timeline.makespan)
    timeline.save(path)
    console.print("What each stage did in a step of 1F1B, to open in a browser:", path, "\n", soft_wrap=True)


def recorded(pipe: GPipe, task: Task) -> Timeline:
    with record() as timeline:
        task.step(pipe, "1f1b")
    return timeline

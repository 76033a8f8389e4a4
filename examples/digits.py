"""Train a residual network on handwritten digits through a pipeline of stages.

python examples/digits.py
python examples/digits.py --devices cuda:0 cuda:1 --chunks 4 --checkpoint always
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from _compare import MiniBatch, compare_memory, compare_results, console, draw, parser
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.balance import balance_cost
from profiler import Profile, profile

Digits = tuple[Tensor, Tensor]  # images of 1 × 8 × 8, and their classes

ON_ONE_CPU = """\
On one CPU the plain model has all cores for each operation, and the stages share them: a pipeline gains memory here.
With a GPU for each of n stages, m micro-batches take (m + n - 1) / (m n) of the time that one GPU takes."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.manual_seed(0)
    data, test = load()
    model = network(options.width)
    plain = copy.deepcopy(model)

    balance = choose_balance(model, data[0][: options.batch], options.devices, options.chunks)
    pipe = GPipe(model, balance, devices=options.devices, chunks=options.chunks, checkpoint=options.checkpoint)
    optimizer = fit(pipe, data, options.epochs, options.batch)

    task = MiniBatch(data[0][: options.batch], data[1][: options.batch], F.cross_entropy)
    measure = {f"accuracy on {len(test[0])} unseen digits": lambda model: f"{accuracy(model, test):.2%}"}
    compare_results(plain, pipe, task, measure)
    alone = GPipe(copy.deepcopy(plain), [len(plain)], devices=options.devices[:1], checkpoint="never")
    compare_memory(alone, pipe, optimizer, task)
    draw(pipe, task, options.timeline)
    compare_times(plain, pipe, task, options.seconds)
    pipe.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, "gpipe-digits.html")
    options.add_argument("--checkpoint", choices=["always", "except_last", "never"], default="never")
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--batch", type=int, default=256, help="digits in a mini-batch")
    options.add_argument("--width", type=int, default=16, help="channels of the first half of the network")
    options.add_argument("--seconds", type=float, default=5.0, help="how long the step times are measured")
    return options.parse_args(argv)


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Group norm, because batch norm would use the statistics of a micro-batch.
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def network(width: int) -> nn.Sequential:
    """Twelve layers: the same image size up to the fifth, then half of it with twice the channels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        *(Residual(width) for _ in range(4)),
        nn.Conv2d(width, 2 * width, 2, stride=2),
        *(Residual(2 * width) for _ in range(4)),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 10),
    )


def load() -> tuple[Digits, Digits]:
    """The digits to train with, and a quarter held out to test with."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_images, test_images = (torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8) for x in split[:2])
    train_labels, test_labels = (torch.tensor(y) for y in split[2:])
    return (train_images, train_labels), (test_images, test_labels)


def choose_balance(model: nn.Sequential, sample: Tensor, devices: Sequence[str], chunks: int) -> list[int]:
    """Return the number of layers per device that minimizes the slowest device's work."""
    measured = profile(model, sample, device=devices[0], chunks=chunks)
    balance = balance_cost(measured.seconds, len(devices))
    show_balance(balance, measured, devices)
    return balance


def show_balance(balance: Sequence[int], measured: Profile, devices: Sequence[str]) -> None:
    table = Table(title=f"Balance of {len(measured.layers)} layers, for a micro-batch of {measured.rows} digits")
    for heading in ("stage", "device", "layers", "forward", "backward", "share"):
        table.add_column(heading, justify="right")
    total = sum(measured.seconds)
    layers = iter(measured.layers)
    for stage, (count, device) in enumerate(zip(balance, devices, strict=True)):
        mine = list(islice(layers, count))
        forward = sum(layer.forward_seconds or 0.0 for layer in mine)
        backward = sum(layer.backward_seconds or 0.0 for layer in mine)
        share = f"{(forward + backward) / total:.1%}"
        table.add_row(str(stage), device, str(count), milliseconds(forward), milliseconds(backward), share)
    console.print(table)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def fit(pipe: GPipe, digits: Digits, epochs: int, batch: int) -> torch.optim.Optimizer:
    """An ordinary training loop: the pipeline is used as the plain model would be."""
    steps = epochs * (len(digits[0]) // batch)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=8e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=steps)
    for images, labels in track(mini_batches(digits, epochs, batch), "training", total=steps, console=console):
        optimizer.zero_grad()
        output = pipe(images)
        F.cross_entropy(output, labels.to(output.device), label_smoothing=0.1).backward()
        optimizer.step()
        schedule.step()
    return optimizer


def mini_batches(digits: Digits, epochs: int, batch: int) -> Iterator[Digits]:
    images, labels = digits
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for start in range(0, len(images) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield images[chosen], labels[chosen]


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    images, labels = digits
    model.eval()
    guesses = model(images).argmax(dim=1).cpu()
    model.train()
    return float((guesses == labels).float().mean())


def compare_times(plain: nn.Sequential, pipe: GPipe, task: MiniBatch, seconds: float) -> None:
    """Print the time of forward and backward of one mini-batch, three ways."""
    plain.to(pipe.devices[0])
    parts = zip(task.inputs.chunk(pipe.chunks), task.targets.chunk(pipe.chunks), strict=True)
    micro_batches = [MiniBatch(*part, task.loss_fn) for part in parts]
    measured = interleaved(
        {
            "plain model": lambda: task.loss(plain).backward(),
            f"plain model, {pipe.chunks} micro-batches": lambda: [
                part.loss(plain).backward() for part in micro_batches
            ],
            f"pipeline of {len(pipe.partitions)} stages": lambda: task.step(pipe, "1f1b"),
        },
        seconds,
    )
    show_step_times(measured)
    if pipe.devices[0].type == "cpu":
        console.print(ON_ONE_CPU, soft_wrap=True)


def interleaved(ways: dict[str, Callable[[], object]], budget: float) -> dict[str, list[float]]:
    """Seconds of each way, measured in turns so that whatever else the machine does disturbs all alike."""
    for way in ways.values():
        way()  # the first time is slower: memory, threads, the choice of algorithms
    rounds: list[dict[str, float]] = []
    deadline = time.perf_counter() + budget
    while len(rounds) < 3 or time.perf_counter() < deadline:
        rounds.append({name: stopwatch(way) for name, way in ways.items()})
    return {name: [seconds[name] for seconds in rounds] for name in ways}


def stopwatch(way: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    way()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def show_step_times(seconds: dict[str, list[float]]) -> None:
    table = Table(title="Forward and backward of one mini-batch")
    for heading in ("", "median", "fastest – slowest", "speed-up"):
        table.add_column(heading, justify="right")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    base = medians["plain model"]
    for name, times in seconds.items():
        spread = f"{milliseconds(min(times))} – {milliseconds(max(times))}"
        table.add_row(name, milliseconds(medians[name]), spread, f"{base / medians[name]:.2f}×")
    console.print(table)


if __name__ == "__main__":
    main()

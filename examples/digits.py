"""Train a residual network on handwritten digits through a pipeline of stages.

python examples/digits.py
python examples/digits.py --devices cuda:0 cuda:1 --chunks 4 --checkpoint always
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from gpipe import GPipe, record
from gpipe.balance import balance_cost
from profiler import Profile, profile

Digits = tuple[Tensor, Tensor]  # images of 1 × 8 × 8, and what they show

ON_ONE_CPU = """\
On one CPU the plain model has all cores for each operation, and the stages share them: a pipeline gains memory here.
With a GPU for each of n stages, m micro-batches take (m + n - 1) / (m n) of the time that one GPU takes."""

console = Console()


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.manual_seed(0)
    train, test = load()
    model = network(options.width)
    plain = copy.deepcopy(model)

    balance = choose_balance(model, train[0][: options.batch], options.devices, options.chunks)
    pipe = GPipe(model, balance, devices=options.devices, chunks=options.chunks, checkpoint=options.checkpoint)

    optimizer = fit(pipe, train, options.epochs, options.batch)
    console.print(f"Accuracy on {len(test[0])} digits never seen in training: [bold]{accuracy(pipe, test):.2%}[/]")
    plain.load_state_dict(pipe.state_dict())
    batch = first(train, options.batch)
    compare_gradients(plain, pipe, batch)
    compare_memory(plain, pipe, optimizer, batch)
    draw(pipe, batch, Path(options.timeline))
    compare_times(plain, pipe, batch, options.seconds)
    pipe.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="one per stage (default: cpu cpu)")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches a mini-batch is cut into")
    parser.add_argument("--checkpoint", choices=["always", "except_last", "never"], default="never")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256, help="digits in a mini-batch")
    parser.add_argument("--width", type=int, default=16, help="channels of the first half of the network")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the step times are measured")
    page = Path(tempfile.gettempdir()) / "gpipe-digits.html"
    parser.add_argument(
        "--timeline", default=str(page), help="where to save the drawing of a step (default: %(default)s)"
    )
    return parser.parse_args(argv)


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Group norm, because the statistics of batch norm would be those of a micro-batch.
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
    """How many layers each device gets, so that the slowest of them has as little to do as possible."""
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
        forward, backward = sum(x.forward_seconds for x in mine), sum(x.backward_seconds for x in mine)
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
    with progress() as bar:
        task = bar.add_task("training", total=steps, loss=float("nan"))
        for images, labels in mini_batches(digits, epochs, batch):
            optimizer.zero_grad()
            output = pipe(images.to(pipe.devices[0]))
            loss = F.cross_entropy(output, labels.to(output.device), label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.update(task, advance=1, loss=loss.item())
    return optimizer


def mini_batches(digits: Digits, epochs: int, batch: int) -> Iterator[Digits]:
    images, labels = digits
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for start in range(0, len(images) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield images[chosen], labels[chosen]


def progress() -> Progress:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


@torch.no_grad()
def accuracy(pipe: GPipe, digits: Digits) -> float:
    images, labels = digits
    pipe.eval()
    guesses = pipe(images.to(pipe.devices[0])).argmax(dim=1).cpu()
    pipe.train()
    return (guesses == labels).float().mean().item()


def compare_gradients(plain: nn.Sequential, pipe: GPipe, digits: Digits) -> None:
    """Print how far the pipeline's gradients of one mini-batch are from those of the plain model."""
    for model in (plain, pipe):
        model.zero_grad()
        backward(model, digits)
    there = dict(pipe.named_parameters())
    pairs = [(x.grad, there[name].grad) for name, x in plain.named_parameters()]
    largest = max(grad.abs().max().item() for grad, _ in pairs)
    difference = max((ours.to(grad.device) - grad).abs().max().item() for grad, ours in pairs)
    console.print(f"Gradients differ from the plain model's by at most {difference / largest:.0e} of the largest.\n")


def backward(model: nn.Module, digits: Digits) -> None:
    images, labels = digits
    output = model(images.to(next(model.parameters()).device))
    F.cross_entropy(output, labels.to(output.device)).backward()


def compare_memory(plain: nn.Sequential, pipe: GPipe, optimizer: torch.optim.Optimizer, digits: Digits) -> None:
    """Print what each device holds: what belongs to its parameters, and at most of activations."""
    table = Table(title="What a device holds at most")
    for heading in ("", *(f"device {stage}" for stage in range(len(pipe.partitions))), "of the plain model's"):
        table.add_column(heading, justify="right")

    def show(way: str, held: list[int]) -> None:
        cells = [mebibytes(size) for size in held] + [""] * (len(pipe.partitions) - len(held))
        table.add_row(way, *cells, f"{max(held) / alone:.0%}")

    states = [bytes_of_training(partition, optimizer) for partition in pipe.partitions]
    whole = GPipe(copy.deepcopy(plain), [len(plain)], devices=pipe.devices[:1], checkpoint="never")
    alone = sum(states) + peaks(whole, digits, "fill_drain")[0]
    show("plain model", [alone])
    checkpoint = pipe.checkpoint
    for checkpointed, pipe.checkpoint in (("", "never"), (", checkpointed", "always")):
        for name, schedule in (("fill-drain", "fill_drain"), ("1F1B", "1f1b")):
            held = [state + peak for state, peak in zip(states, peaks(pipe, digits, schedule), strict=True)]
            show(name + checkpointed, held)
    pipe.checkpoint = checkpoint
    console.print(table)
    console.print(f"Of this, parameters with gradients and AdamW's state: {', '.join(map(mebibytes, states))}.\n")


def bytes_of_training(stage: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a stage's parameters, their gradients and what the optimizer keeps for them."""
    tensors = [
        tensor
        for parameter in stage.parameters()
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values())
        if isinstance(tensor, Tensor)
    ]
    return sum(tensor.nbytes for tensor in tensors)


def peaks(pipe: GPipe, digits: Digits, schedule: str) -> list[int]:
    """Bytes of activations that each stage holds at most during a step."""
    with record(memory=True) as timeline:
        pipe.step(*digits, loss_fn=F.cross_entropy, schedule=schedule)
    return [timeline.peak_bytes[stage] for stage in range(len(pipe.partitions))]


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def draw(pipe: GPipe, digits: Digits, page: Path) -> None:
    """Save a drawing of one step."""
    with record() as timeline:
        pipe.step(*digits, loss_fn=F.cross_entropy)
    timeline.save(page)
    console.print("What each stage did in a step of 1F1B, to open in a browser:", page, "\n", soft_wrap=True)


def compare_times(plain: nn.Sequential, pipe: GPipe, digits: Digits, seconds: float) -> None:
    """Print the time of forward and backward of one mini-batch, three ways."""
    plain.to(pipe.devices[0])
    micro_batches = list(zip(*(part.chunk(pipe.chunks) for part in digits), strict=True))
    measured = interleaved(
        {
            "plain model": lambda: backward(plain, digits),
            f"plain model, {pipe.chunks} micro-batches": lambda: [backward(plain, part) for part in micro_batches],
            f"pipeline of {len(pipe.partitions)} stages": lambda: pipe.step(*digits, loss_fn=F.cross_entropy),
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


def first(digits: Digits, count: int) -> Digits:
    return digits[0][:count], digits[1][:count]


if __name__ == "__main__":
    main()

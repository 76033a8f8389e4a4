"""Helpers of the programs: devices for two stages, a network, and table rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gpipe import GPipe

SCHEDULES = ("fill_drain", "1f1b", "interleaved", "zero_bubble")
MODES = ("never", "except_last", "always")


def two_devices() -> list[torch.device]:
    """Return devices for two stages: two GPUs, one GPU twice, or else the CPU."""
    count = torch.cuda.device_count()
    return [torch.device("cuda", k * count // 2) for k in range(2)] if count else [torch.device("cpu")] * 2


def network(width: int, layers: int = 8) -> nn.Sequential:
    """Return a network with the same weights in each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers))
    )


def transformer(width: int, dropout: float) -> nn.Sequential:
    """Eight layers, with the same weights at each call."""
    torch.manual_seed(0)
    layer = partial(nn.TransformerEncoderLayer, width, 16, 4 * width, dropout, batch_first=True)
    return nn.Sequential(*(layer() for _ in range(8)))


def mean_square(output: Tensor, _: object = None) -> Tensor:
    return output.square().mean()


def step(pipe: GPipe, x: Tensor, schedule: str) -> Tensor:
    """Run a training step without an optimizer; ``"whole"`` computes the loss once, on the full batch."""
    pipe.zero_grad()
    known = {} if schedule == "whole" else {"reduction": "mean", "schedule": schedule}
    loss: Tensor = pipe.step(x, loss_fn=mean_square, **known)
    return loss


def synchronize(devices: list[torch.device]) -> None:
    for device in gpus(devices):
        torch.cuda.synchronize(device)


def gpus(devices: list[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


def seconds(work: Callable[[], object], devices: list[torch.device], count: int) -> float:
    """The mean of ``count`` calls, after two more, until the devices are done."""
    work(), work()
    synchronize(devices)
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(devices)
    return (time.perf_counter() - start) / count


def peak(devices: list[torch.device], work: Callable[[], object]) -> str:
    """MiB that the allocator of each GPU held at most during ``work``, above what it held before."""
    before = [torch.cuda.memory_allocated(device) for device in gpus(devices)]
    for device in gpus(devices):
        torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(devices)
    peaks = [torch.cuda.max_memory_allocated(device) for device in gpus(devices)]
    return ", ".join(f"{(most - least) / 2**20:.1f}" for most, least in zip(peaks, before, strict=True)) or "–"


def head(*names: str) -> None:
    row(*names)
    row(*["---"] * len(names))


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)

"""A transformer under each schedule and with or without checkpointing: times of host and device, bubble, peak."""

from __future__ import annotations

import argparse
import logging
import time
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

import gpipe
from gpipe import GPipe

SCHEDULES = ("fill_drain", "1f1b", "interleaved", "zero_bubble")
HEAD = ("checkpoint", "schedule", "host ms", "until done ms", "bubble", "peak GiB")


def main() -> None:
    options = _arguments()
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # that nothing is interleaved here is known
    devices = _devices()
    print(f"| {' | '.join(HEAD)} |\n|---|---|---:|---:|---:|---:|", flush=True)
    for mode, schedule in product(("never", "except_last"), SCHEDULES):
        print(f"| {' | '.join(_row(options, devices, mode, schedule))} |", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5, help="of which the mean is taken, after as many to warm up")
    return parser.parse_args()


def _devices() -> list[torch.device]:
    """Of two stages: two GPUs, one for both, or else the CPU."""
    count = torch.cuda.device_count()
    return [torch.device("cuda", k * count // 2) for k in range(2)] if count else [torch.device("cpu")] * 2


def _row(options: argparse.Namespace, devices: list[torch.device], mode: str, schedule: str) -> list[str]:
    torch.manual_seed(0)
    layer = partial(nn.TransformerEncoderLayer, options.width, 16, 4 * options.width, 0.1, batch_first=True)
    pipe = GPipe(nn.Sequential(*(layer() for _ in range(8))), [4, 4], devices=devices, chunks=8, checkpoint=mode)
    x = torch.randn(options.rows, options.length, options.width, device=devices[0])
    _steps(pipe, x, schedule, options.steps)
    _done(devices)
    for device in _gpus(devices):
        torch.cuda.reset_peak_memory_stats(device)
    host, until_done = (each / options.steps for each in _seconds(pipe, x, schedule, options.steps, devices))
    with gpipe.record() as timeline:
        _step(pipe, x, schedule)
    figures = [f"{host * 1e3:.1f}", f"{until_done * 1e3:.1f}", f"{timeline.bubble:.3f}", _peak(devices)]
    pipe.close()
    return [mode, schedule, *figures]


def _seconds(pipe: GPipe, x: Tensor, schedule: str, count: int, devices: list[torch.device]) -> tuple[float, float]:
    """Of so many steps: until the host is through, and until the devices are."""
    start = time.perf_counter()
    _steps(pipe, x, schedule, count)
    host = time.perf_counter() - start
    _done(devices)
    return host, time.perf_counter() - start


def _steps(pipe: GPipe, x: Tensor, schedule: str, count: int) -> None:
    for _ in range(count):
        _step(pipe, x, schedule)


def _step(pipe: GPipe, x: Tensor, schedule: str) -> None:
    pipe.zero_grad()
    pipe.step(x, loss_fn=lambda output, _: output.square().mean(), schedule=schedule)


def _done(devices: list[torch.device]) -> None:
    for device in _gpus(devices):
        torch.cuda.synchronize(device)


def _peak(devices: list[torch.device]) -> str:
    peaks = [torch.cuda.max_memory_allocated(device) / 2**30 for device in _gpus(devices)]
    return ", ".join(f"{peak:.2f}" for peak in peaks) or "–"


def _gpus(devices: list[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


main()

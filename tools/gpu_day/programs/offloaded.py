"""A model with parameters, or saved tensors, on the host, compared with the resident model.

FSDP2's CPU offload and save_on_cpu are measured as well. Then a model of four times the memory of the process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe

from .common import head, mean_square, network, peak, row, seconds, two_devices

CHUNKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--count", type=int, default=3)
    options = parser.parse_args()
    device = two_devices()[0]
    sizes = [options.width * each for each in (1, 4)]
    head("way", *(f"ms, {rows} rows" for rows in sizes), *(f"MiB, {rows} rows" for rows in sizes))
    for name, made in WAYS.items():
        if name.startswith("FSDP2") and device.type == "cpu":
            continue
        step = made(network(options.width, options.layers), device)
        batches = [torch.randn(rows, options.width, device=device) for rows in sizes]
        times = [seconds(lambda x=x, step=step: step(x), [device], options.count) * 1e3 for x in batches]
        peaks = [peak([device], lambda x=x, step=step: step(x)) for x in batches]
        row(name, *(f"{each:.0f}" for each in times), *peaks)
        del step, batches
    with memory_of(device, network(options.width, options.layers), share=4) as limited:
        step = offloaded(network(options.width, options.layers), device)
        x = torch.randn(sizes[0], options.width, device=device)
        time = seconds(lambda: step(x), [device], options.count) * 1e3
        row(f"offload=True, {limited}", f"{time:.0f}", "–", peak([device], lambda: step(x)), "–")


Step = Callable[[Tensor], object]


def resident(checkpoint: str) -> Callable[[nn.Sequential, torch.device], Step]:
    """Keep all micro-batches in flight, which maximizes the amount saved, recomputed or moved."""

    def made(layers: nn.Sequential, device: torch.device) -> Step:
        pipe = GPipe(layers, [len(layers) // 2] * 2, devices=[device] * 2, chunks=CHUNKS, checkpoint=checkpoint)
        return _stepping(pipe, "fill_drain")

    return made


def offloaded(layers: nn.Sequential, device: torch.device) -> Step:
    return _stepping(_offloaded_pipe(layers, device))


def offloaded_and_updated(layers: nn.Sequential, device: torch.device) -> Step:
    """The optimizer runs on the host, while stages compute."""
    pipe = _offloaded_pipe(layers, device)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-4, fused=True)
    return lambda x: pipe.step(x, loss_fn=mean_square, reduction="mean", optimizer=optimizer)


def offloaded_then_updated(layers: nn.Sequential, device: torch.device) -> Step:
    """Train an offloaded pipe, and update parameters after the step instead of during it."""
    pipe = _offloaded_pipe(layers, device)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-4, fused=True)

    def step(x: Tensor) -> None:
        pipe.step(x, loss_fn=mean_square, reduction="mean")
        optimizer.step()
        optimizer.zero_grad()

    return step


def _offloaded_pipe(layers: nn.Sequential, device: torch.device) -> GPipe:
    places = [device if device.type != "cpu" else torch.device("cpu", 0)] * len(layers)
    return GPipe(layers, [1] * len(layers), devices=places, chunks=CHUNKS, checkpoint="always", offload=True)


def saved_on_cpu(layers: nn.Sequential, device: torch.device) -> Step:
    """Train the plain model with saved tensors on the host."""
    layers.to(device)

    def step(x: Tensor) -> None:
        layers.zero_grad()
        for part in x.chunk(CHUNKS):
            with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
                loss = mean_square(layers(part)) / CHUNKS
            loss.backward()

    return step


def fsdp(layers: nn.Sequential, device: torch.device) -> Step:
    """Gather each layer from the host for each micro-batch, and recompute it."""
    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29555", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("cpu:gloo,cuda:nccl")
    for layer in layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(layers, offload_policy=CPUOffloadPolicy())

    def step(x: Tensor) -> None:
        layers.zero_grad()
        for part in x.chunk(CHUNKS):
            value = part
            for layer in layers:
                value = checkpoint(layer, value, use_reentrant=False)
            (mean_square(value) / CHUNKS).backward()

    return step


WAYS: dict[str, Callable[[nn.Sequential, torch.device], Step]] = {
    "resident": resident("always"),
    "resident, checkpoint='never'": resident("never"),
    "resident, checkpoint='offload'": resident("offload"),
    "offload=True": offloaded,
    "offload=True, then SGD": offloaded_then_updated,
    "offload=True, step(optimizer=SGD)": offloaded_and_updated,
    "save_on_cpu": saved_on_cpu,
    "FSDP2 with CPUOffloadPolicy": fsdp,
}


def _stepping(pipe: GPipe, schedule: str | None = None) -> Step:
    def step(x: Tensor) -> None:
        pipe.zero_grad()
        pipe.step(x, loss_fn=mean_square, reduction="mean", schedule=schedule)

    return step


@contextmanager
def memory_of(device: torch.device, layers: nn.Module, share: int) -> Iterator[str]:
    """Limit this process to a fraction of the bytes of ``layers``, plus the allocator's minimum."""
    size = sum(parameter.nbytes for parameter in layers.parameters()) // share
    if device.type == "cpu":
        yield "no limit on a CPU"
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(device).total_memory, device)
    try:
        yield f"limited to {size / 2**20:.0f} MiB"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


if __name__ == "__main__":
    main()

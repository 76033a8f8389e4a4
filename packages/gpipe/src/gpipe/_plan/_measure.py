"""Measure what a plan is made of: layers at a few sizes of micro-batches, the engine, the links."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from microbatch import Batch
from profiler import Profile, profile

from ..balance._balance import intra_op_threads
from ..timeline._hops import Link
from ._costs import Measured, SharedParameter
from ._fleet import Fleet, estimated
from ._request import Request

SECONDS = 0.6
"""For each size of micro-batch that layers are profiled at."""

ACTION, STEP = 60e-6, 5e-4
"""Seconds that the engine adds to each action and each step on a CPU (``docs/benchmarks/engine.md``)."""


def measure(request: Request) -> list[Measured]:
    """What is known for each layout: measured on devices like those of the plan; for others bytes are counted, seconds
    estimated.
    """
    rows, tensors, places, fleet = request.rows, list(Batch(request.sample)), request.places, request.fleet
    one = request.layouts[0]
    chunks = sorted({each.replicas * m for each in request.layouts for m in each.chunks})
    sizes = _sizes(rows, chunks, one.stages * one.replicas)
    size = sum(tensor.nbytes for tensor in tensors)
    common: dict[str, Any] = {
        "optimizer": tuple(request.optimizer),
        "needs_gradient": any(tensor.requires_grad for tensor in tensors),
        "ties": ties_of(request.layers),
    }
    if fleet:
        profile = _counted(request, fleet, sizes)
        return [
            Measured(
                profiles=(profile,) * each.stages,
                rows=each.rows,
                input_bytes=size // each.replicas,
                input_moves=True,
                copied=(False, *(True,) * (each.stages - 1)),
                links=fleet.links(each.stages),
                replicas=each.replicas,
                ring=fleet.ring,
                **common,
            )
            for each in request.layouts
        ]
    profiles = {each.type: each for each in reversed(places)}
    known = {kind: request.profile or _profiled(request, place, sizes) for kind, place in profiles.items()}
    # On accelerators, work is queued ahead of them, so that what the engine does takes no time of theirs.
    action, step = (ACTION, STEP) if all(place.type == "cpu" for place in places) else (0.0, 0.0)
    found = Measured(
        profiles=tuple(known[device.type] for device in places),
        rows=rows,
        input_bytes=size,
        input_moves=any(tensor.device != places[0] for tensor in tensors) and places[0].type != "cpu",
        copied=(False, *(a != b for a, b in pairwise(map(_place, places)))),
        links=(Link(), *(_link(a, b) for a, b in pairwise(places))),
        action=action,
        step=step,
        crowding=_crowding(places),
        **common,
    )
    return [found]


def ties_of(layers: nn.Sequential) -> tuple[SharedParameter, ...]:
    """The parameters that several layers have."""
    holders: dict[nn.Parameter, list[int]] = {}
    for k, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(parameter, []).append(k)
    return tuple(
        SharedParameter(tuple(own), parameter.nbytes, parameter.nbytes * parameter.requires_grad)
        for parameter, own in holders.items()
        if len(own) > 1
    )


def _sizes(rows: int, chunks: Sequence[int], stages: int) -> list[int]:
    """Rows of micro-batches to measure at: the smallest, the largest that is not idle for long, and one between."""
    few = [m for m in chunks if m >= stages] or [chunks[-1]]
    least, most = -(-rows // chunks[-1]), -(-rows // few[0])
    if most == least:  # a line needs two points
        return sorted({least, 2 * least if 2 * least <= rows else max(1, least // 2)})
    middle = round((least * most) ** 0.5)
    return sorted({least, middle, most} if most >= 8 * least else {least, most})


def _profiled(request: Request, device: torch.device, sizes: Sequence[int]) -> Profile:
    shares = sum(other.type == "cpu" for other in request.places)
    threads = max(1, torch.get_num_threads() // shares) if device.type == "cpu" else torch.get_num_threads()
    with intra_op_threads(threads):
        return _profile(request, _place(device), sizes)


def _counted(request: Request, fleet: Fleet, sizes: Sequence[int]) -> Profile:
    found = request.profile or _profile(request, torch.device("meta"), sizes)
    return estimated(found, fleet) if any(layer.seconds is None for layer in found) else found


def _profile(request: Request, device: torch.device, sizes: Sequence[int]) -> Profile:
    return profile(
        request.layers, request.sample, device=device, rows=sizes, loss_fn=request.loss_fn, target=request.target,
        split_backward=True, timeout=SECONDS,
    )  # fmt: skip


def _crowding(devices: Sequence[torch.device]) -> float:
    workers = sum(device.type == "cpu" for device in devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1.0, workers / cores)


def _place(device: torch.device) -> torch.device:
    """Where tensors lie: the numbers of CPUs say which worker a stage has, and nothing of memory."""
    return torch.device("cpu") if device.type == "cpu" else device


_COPIES = 5


def _link(a: torch.device, b: torch.device) -> Link:
    """How long things take from a device to another: the line through the times of two sizes."""
    if _place(a) == _place(b):
        return Link()
    small, large = 2**12, 2**24
    quick, slow = (_copy_seconds(a, b, size) for size in (small, large))
    return Link(latency=quick, bandwidth=(large - small) / max(slow - quick, 1e-9))


def _copy_seconds(a: torch.device, b: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=a)
    found = []
    for _ in range(_COPIES):
        synchronize((a, b))
        begin = time.perf_counter()
        source.to(b)
        synchronize((a, b))
        found.append(time.perf_counter() - begin)
    return min(found)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until these devices are through with what is queued on them."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

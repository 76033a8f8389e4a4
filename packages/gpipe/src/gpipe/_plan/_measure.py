"""Collect the costs for a plan: layers at a few micro-batch sizes, engine overhead, and links."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import nn

from microbatch import Batch, scatter
from profiler import Profile, profile
from profiler.memory import held_bytes

from ..balance._balance import intra_op_threads
from ..engine._cores import usable
from ..engine._loss_value import LossValue
from ._arguments import count_rows
from ._blocks import Training, is_whole, profile_blocks
from ._candidate import SearchSpace
from ._costs import Measured, SharedParameter
from ._dry_run import returns_sums
from ._fake_devices import estimate_profile
from ._links import along, measure_links
from ._loss import waiting
from ._orders import orders
from ._planned import Planned
from ._request import Request
from ._speeds import at_full_speed, estimate_speeds, measure_speeds, relative

SECONDS = 0.6
"""The seconds to profile layers per micro-batch size."""

ACTION, STEP = 60e-6, 5e-4
"""The seconds that the engine adds per action and per step on a CPU (``docs/benchmarks/engine.md``)."""


def measure(request: Request) -> list[SearchSpace]:
    """Return the space to search for each order of the devices and each placement of stages.

    For hypothetical devices, bytes are counted and seconds estimated.
    Raise ValueError if the requested schedule cannot wait for a loss of the full mini-batch.
    """
    found, whole, speeds = _profile(request)
    ties = find_ties(request.model.layers.values())
    tensors, place, devices = list(Batch(request.sample)), request.places[0], len(request.places)
    # On accelerators, work is queued ahead, so the overhead of the engine does not delay them.
    is_cpu, cores = place.type == "cpu", len(usable()) or os.cpu_count() or 1

    between = request.fake.links if request.fake else measure_links(request.places)

    def of(order: tuple[int, ...], placement: tuple[int, ...], schedules: Sequence[str]) -> SearchSpace:
        measured = Measured(
            profile=found,
            optimizer=tuple(request.optimizer),
            rows=count_rows(request.sample),
            input_bytes=sum(tensor.nbytes for tensor in tensors),
            needs_gradient=any(tensor.requires_grad for tensor in tensors),
            separate_memory=not is_cpu,
            placement=placement,
            links=along(between, [order[device] for device in placement]),
            action=ACTION if is_cpu else 0.0,
            step=STEP if is_cpu else 0.0,
            cpu_contention=max(1.0, devices / cores) if is_cpu else 1.0,
            ties=ties,
            whole_loss=whole,
            host=request.host,
            speeds=tuple(speeds[k] for k in order),
            order=order,
        )
        return SearchSpace(measured, request.chunks, schedules, request.modes, measured.reorder(request.memory))

    searched = [(each, waiting(names) if whole else names) for each, names in request.placements.items()]
    of_devices = orders([*zip(request.memory, speeds, strict=True)], between)
    spaces = [of(order, placement, names) for order in of_devices for placement, names in searched if names]
    if not spaces:
        raise request.loss.build_error(next(iter(request.placements.values()))[0])
    return spaces


def find_ties(layers: Iterable[nn.Module]) -> tuple[SharedParameter, ...]:
    holders: dict[nn.Parameter, list[int]] = {}
    for k, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(parameter, []).append(k)
    return tuple(
        SharedParameter(tuple(own), held_bytes([parameter]), held_bytes([parameter]) * parameter.requires_grad)
        for parameter, own in holders.items()
        if len(own) > 1
    )


def _profile(request: Request) -> tuple[Profile, bool, Sequence[float]]:
    """Return the caller's profile, or one measured with a stage's share of the threads.

    Also return whether the loss is computed once, and the speeds of the devices, relative to the profiled one.
    """
    places, devices, threads = request.places, len(request.places), torch.get_num_threads()
    with intra_op_threads(max(1, threads // devices) if places[0].type == "cpu" else threads):
        # Measured even if the caller passes speeds, because devices may differ more on this model than on all.
        real = measure_speeds(places, request.model.module) if request.fake is None else [1.0] * devices
        found, whole = (_layers if request.model.division is None else _blocks)(request, real)
    if request.fake is None:
        return found, whole, relative(request.speeds, real)
    each = request.fake.each[:devices]
    speeds = relative(request.speeds, estimate_speeds(found, each))
    is_timed = all(layer.seconds is not None for layer in found)
    return found if is_timed else estimate_profile(found, each[0]), whole, speeds


def _blocks(request: Request, speeds: Sequence[float]) -> tuple[Profile, bool]:
    given = Training(request.model, request.sample, request.target, request.loss)
    if request.profile is not None:
        return request.profile, is_whole(given)
    blocks, places = len(request.model.layers), request.places
    # On accelerators, blocks are spread over all devices, since the full model must fit into their memory at once.
    on = [0] * blocks if places[0].type == "cpu" else spread(request.model, request.memory)
    of = [torch.device("cpu") if places[k].type == "cpu" else places[k] for k in on]
    sizes = _sizes(count_rows(request.sample), request.chunks, len(places))
    found, whole = profile_blocks(given, of, sizes, SECONDS, ACTION if places[0].type == "cpu" else 0.0)
    return at_full_speed(found, [speeds[k] for k in on]), whole


def spread(model: Planned, memory: Sequence[int | None]) -> list[int]:
    """Return the index of the device of each block, such that the bytes of parameters are in proportion to memory."""
    sizes = [1 + held_bytes(layer.parameters()) for layer in model.layers.values()]
    rooms = [1 if room is None else room for room in memory]
    ends = [end / sum(rooms) for end in accumulate(rooms)]
    middles = [(end - size / 2) / sum(sizes) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [bisect_left(ends[:-1], middle) for middle in middles]


def _layers(request: Request, speeds: Sequence[float]) -> tuple[Profile, bool]:
    place, found, loss, seen = request.places[0], request.profile, request.loss, list[bool]()
    layers, batches = request.model.module, scatter(request.sample, 1)

    def tell(value: LossValue) -> None:
        seen.append(value.count is not None)

    if found is None:
        found = profile(
            layers, request.sample, device=torch.device("cpu") if place.type == "cpu" else place,
            rows=_sizes(count_rows(request.sample), request.chunks, len(request.places)), target=request.target,
            loss_fn=loss.watch(tell), split_backward=True, timeout=SECONDS,
        )  # fmt: skip
    if not seen and loss.loss_fn is not None and loss.is_whole(batches, returns_sums=False):  # a profile was given
        seen.append(returns_sums(request.model, request.sample, request.target, loss))
    return found, loss.is_whole(batches, returns_sums=any(seen))


def _sizes(rows: int, chunks: Sequence[int], stages: int) -> list[int]:
    """Return the micro-batch sizes to measure, in rows.

    These are the smallest size, the largest with at least one micro-batch per stage, and one in between if those two
    are far apart.
    """
    few = [m for m in chunks if m >= stages] or [chunks[-1]]
    least, most = -(-rows // chunks[-1]), -(-rows // few[0])
    if most == least:  # two points determine a line
        return sorted({least, 2 * least if 2 * least <= rows else max(1, least // 2)})
    middle = round((least * most) ** 0.5)
    return sorted({least, middle, most} if most >= 8 * least else {least, most})

"""The links between the devices of a plan: assumed, passed by the caller, or measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch

from ..timeline._hops import Link
from ._arguments import read_bytes

LINK = Link(latency=10e-6, bandwidth=25e9)
"""The default link between two devices, about PCI Express 4."""

Links = tuple[tuple[Link, ...], ...]
"""The link from each device to each device. From a device to itself, transfers take no time."""

Pair = tuple[int, int]
"""The indices of two devices."""

_ALIKE = 1.3
"""The most that measured bandwidths of equal links differ by, as a factor."""

_SIZE, _TURNS = 2**24, 8
"""The bytes of a measured transfer, and the number of transfers."""


def links(devices: int, between: Callable[[int, int], Link]) -> Links:
    """Return the links of devices, where ``between(i, j)`` is the link of two devices."""
    return tuple(tuple(Link() if i == j else between(i, j) for j in range(devices)) for i in range(devices))


def along(links: Links, devices: Sequence[int]) -> tuple[Link, ...]:
    """Return the link to each stage from the previous one, for stages on these devices."""
    return (Link(), *(links[i][j] for i, j in pairwise(devices)))


def read_links(bandwidth: Any, latency: Any, devices: int) -> Links:
    """Return the links of hypothetical devices.

    Args:
        bandwidth: as for :func:`gpipe.plan`: one for all links, a mapping from pairs of devices, or None.
        latency: seconds per transfer, or None.
        devices: the number of devices.
    """
    if latency is not None and (isinstance(latency, bool) or not isinstance(latency, (int, float))):
        raise TypeError(f"latency: expected seconds, such as 5e-6; got {latency!r}")
    seconds = LINK.latency if latency is None else latency
    pairs = _read_pairs(bandwidth, devices) if isinstance(bandwidth, Mapping) else {}
    given = bandwidth is not None and not isinstance(bandwidth, Mapping)
    default = read_bytes(bandwidth, "bandwidth") if given else LINK.bandwidth
    return links(devices, lambda i, j: Link(seconds, pairs.get((i, j), pairs.get((j, i), default))))


def _read_pairs(bandwidth: Mapping[Any, Any], devices: int) -> dict[Pair, int]:
    for pair in bandwidth:
        indices = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        if not all(type(k) is int and 0 <= k < devices for k in indices) or indices[0] == indices[1]:
            raise ValueError(
                f"bandwidth: expected pairs of the indices of two devices below {devices}, such as "
                f"{{(0, 1): '100GB'}}; got {pair!r}"
            )
    return {pair: read_bytes(size, f"bandwidth[{pair}]") for pair, size in bandwidth.items()}


def measure_links(devices: Sequence[torch.device]) -> Links:
    """Return the links of real devices. CPUs share memory, so their links take no time.

    The measurement includes that a copy between GPUs without peer access passes through the host.
    """
    if devices[0].type == "cpu":
        return links(len(devices), lambda i, j: Link())
    found = levels(
        {
            (i, j): _bandwidth(torch.empty(_SIZE, dtype=torch.uint8, device=devices[i]), devices[j])
            for i, j in combinations(range(len(devices)), 2)
        }
    )
    return links(len(devices), lambda i, j: Link(LINK.latency, found[min(i, j), max(i, j)]))


def levels(bandwidths: Mapping[Pair, float]) -> dict[Pair, float]:
    """Replace bandwidths that are about equal, which measurements cannot distinguish, by the smallest of them.

    >>> levels({(0, 1): 12e9, (0, 2): 13e9, (1, 2): 50e9})
    {(0, 1): 12000000000.0, (0, 2): 12000000000.0, (1, 2): 50000000000.0}
    """
    found, level = dict[Pair, float](), 0.0
    for pair in sorted(bandwidths, key=lambda pair: bandwidths[pair]):
        if bandwidths[pair] > level * _ALIKE:
            level = bandwidths[pair]
        found[pair] = level
    return found


def measure_host_bandwidth(devices: Sequence[torch.device]) -> float:
    """Return the bytes per second between pinned memory of the host and the device with the slowest link to it.

    The default is assumed for devices without pinned memory.
    """
    try:
        pinned, host = torch.empty(_SIZE, dtype=torch.uint8, pin_memory=True), torch.device("cpu")
    except RuntimeError:
        return LINK.bandwidth
    return min(
        min(_bandwidth(pinned, device), _bandwidth(pinned.to(device), host, into=pinned)) for device in {*devices}
    )


def _bandwidth(source: torch.Tensor, device: torch.device, into: torch.Tensor | None = None) -> float:
    """Return the bytes per second of copies of ``source`` to ``device``."""
    target = torch.empty_like(source, device=device) if into is None else into
    timed = source.device if device.type == "cpu" else device
    for turns in (1, _TURNS):  # the first is a warm-up
        torch.accelerator.synchronize(timed)
        begin = time.perf_counter()
        for _ in range(turns):
            target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(timed)
        if source.device.type != "cpu":
            torch.accelerator.synchronize(source.device)
    return _TURNS * source.nbytes / (time.perf_counter() - begin)


def describe_links(used: Iterable[Link]) -> str:
    """Return the bandwidths of links between devices as text."""
    known = sorted({link.bandwidth for link in used if link.bandwidth < math.inf}) or [LINK.bandwidth]
    texts = dict.fromkeys(f"{bandwidth / 1e9:.4g}" for bandwidth in (known[0], known[-1]))
    return f"{' to '.join(texts)} GB/s"

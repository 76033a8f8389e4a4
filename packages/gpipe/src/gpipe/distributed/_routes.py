"""Which stages and shared weights of different ranks are connected, and which of them from device to device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from streams import has_streams

from ..skip import SkipLayout

TRANSPORTS = ("auto", "host")

_OF_HOSTS = frozenset({"gloo", "mpi", "fake"})

Route = tuple[int, int, int]
"""The number of a channel, and its two stages."""


def backend_of(device: torch.device, transport: str) -> str | None:
    """The backend of process groups that sends from ``device``, such as ``"nccl"``; None if that is by way of hosts."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}; got {transport!r}")
    if transport == "host" or not has_streams(device):
        return None
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:  # torch has no backend for it
        return None
    return backend if backend not in _OF_HOSTS and dist.is_backend_available(backend) else None


def routes_between(ranks: Sequence[int], layout: SkipLayout, ties: Sequence[tuple[int, int]]) -> list[Route]:
    """The channels between stages of two ranks, of skips, and of shared tensors, numbered alike on all ranks."""
    ends = [*[(j - 1, j) for j in range(1, len(ranks))], *[route[1:] for route in layout.routes], *ties]
    return [(number, a, b) for number, (a, b) in enumerate(ends, start=1) if ranks[a] != ranks[b]]


def tags(number: int) -> tuple[int, int]:
    return 2 * number, 2 * number + 1


def direct(routes: Iterable[Route], backends: Sequence[str | None]) -> list[Route]:
    """The directions in which tensors go from device to device: tag, first and last stage, in the same order on all
    ranks.
    """
    found = []
    for number, a, b in routes:
        if backends[a] is not None and backends[a] == backends[b]:
            forth, back = tags(number)
            found += [(forth, a, b), (back, b, a)]
    return found

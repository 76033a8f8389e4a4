"""Which stages can send tensors from accelerator to accelerator, without a copy in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from streams import has_streams

from ..skip import SkipLayout

TRANSPORTS = ("auto", "host")

_OF_HOSTS = frozenset({"gloo", "mpi", "fake"})


class Place(NamedTuple):
    """What other ranks need to know of the device of a stage.

    Attributes:
        backend: the backend of process groups that sends from such devices, such as ``"nccl"``; None if there is none.
        card: identifies the device among those of all machines; None if the device does not say.
    """

    backend: str | None
    card: str | None


def checked_transport(transport: str) -> str:
    """``transport``; ValueError if there is no transport of that name."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}; got {transport!r}")
    return transport


def place_of(device: torch.device, transport: str) -> Place:
    """The place of a stage on ``device``."""
    backend = _backend_of(device) if transport == "auto" and has_streams(device) else None
    return Place(backend, None if backend is None else _card(device))


def _backend_of(device: torch.device) -> str | None:
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:  # torch has no backend for it
        return None
    return backend if backend not in _OF_HOSTS and dist.is_backend_available(backend) else None


def _card(device: torch.device) -> str | None:
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


Route = tuple[int, int, int]
"""The number of a channel, and its two stages."""


def channels_between(ranks: Sequence[int], layout: SkipLayout) -> list[Route]:
    """The channels between stages of two ranks; the same on all ranks."""
    ends = [(j - 1, j) for j in range(1, len(ranks))]
    numbered = [*enumerate(ends, start=1), *enumerate([route[1:] for route in layout.routes], start=len(ranks))]
    return [(number, a, b) for number, (a, b) in numbered if ranks[a] != ranks[b]]


def tags(number: int) -> tuple[int, int]:
    """The tags of the values and of the gradients of that channel."""
    return 2 * number, 2 * number + 1


def ties_between(ranks: Sequence[int], layout: SkipLayout, ties: Sequence[tuple[int, int]]) -> list[Route]:
    """Like :func:`channels_between`, for tensors that pairs of ranks share. Their numbers follow those of channels."""
    return [(number, a, b) for number, (a, b) in enumerate(ties, start=len(ranks) + len(layout.routes))]


def direct(routes: Iterable[Route], places: Sequence[Place]) -> list[Route]:
    """The directions in which tensors go from device to device, in the same order on all ranks.

    Args:
        routes: the channels, between all ranks.
        places: the place of each stage.

    Returns:
        For each direction its tag, and the stages at its begin and end.
    """
    found = []
    for number, a, b in routes:
        if _reach(places[a], places[b]):
            forth, back = tags(number)
            found += [(forth, a, b), (back, b, a)]
    return found


def _reach(a: Place, b: Place) -> bool:
    """Whether a process group of two can connect these places. NCCL refuses two processes on one device."""
    shared = a.card is not None and a.card == b.card
    return a.backend is not None and a.backend == b.backend and not shared

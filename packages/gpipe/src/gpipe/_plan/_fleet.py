"""Devices that are not there: bytes are counted on fake tensors, and seconds estimated by a roofline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple

from profiler import LayerProfile, Profile

from ..timeline._hops import Link
from ._arguments import placed, read_bytes, read_chunks

_FLOPS_REACHED, _BANDWIDTH_REACHED = 0.4, 0.7
"""The approximate shares of a data sheet's figures that training reaches."""

INSIDE = Link(latency=10e-6, bandwidth=25e9)
"""Between two devices of a node: about PCI Express 4."""

BETWEEN = Link(latency=10e-6, bandwidth=12.5e9)
"""From a device to another node: 100 Gbit/s for each."""

FAKE = "fake "
"""The begin of the names of devices that this machine does not have."""

_KINDS = {
    "V100": (32 * 10**9, 125e12, 0.9e12),
    "A100": (80 * 10**9, 312e12, 2.0e12),
    "H100": (80 * 10**9, 989e12, 3.35e12),
    "H200": (141 * 10**9, 989e12, 4.8e12),
}
_GENERIC = "A100"
_SPEC = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*x\s*(\S.*?)\s*")


@dataclass(frozen=True)
class Fleet:
    """Some equal devices that are not there.

    Attributes:
        nodes: how many nodes; None where the devices are the stages of one pipe.
        count: how many devices, in each node.
        memory: bytes of each.
        flops, bandwidth: operations and bytes a second, by the data sheet.
        inside, between: links between two devices of a node, and of two nodes.
    """

    nodes: int | None
    count: int
    name: str
    memory: int
    flops: float
    bandwidth: float
    inside: Link = INSIDE
    between: Link = BETWEEN

    def link(self, devices: int, before: int, own: int) -> Link:
        """The link from one of the devices of a replica to another one; between nodes if it is that in any replica."""
        aligned = gcd(devices, self.count)
        alone = self.nodes is None or self.nodes == 1
        return self.inside if alone or before // aligned == own // aligned else self.between

    def replicas(self, layers: int) -> dict[int, int]:
        """How many replicas there are, by the devices of each; at most as many of these as ``layers``."""
        if self.nodes is None:
            return {min(self.count, layers): 1}
        devices = self.count * self.nodes
        return {k: devices // k for k in range(1, min(devices, layers) + 1) if devices % k == 0}

    @property
    def ring(self) -> float:
        """Bytes a second from a device to the one of the next replica."""
        return (self.between if (self.nodes or 1) > 1 else self.inside).bandwidth


class Layout(NamedTuple):
    """How devices are divided into replicas of a pipe.

    Attributes:
        replicas: pipes that train the same model, each on other rows.
        rows: of the mini-batch, for each replica.
        chunks, schedules: those to search.
        placement: the device of each stage of a replica.
    """

    replicas: int
    rows: int
    chunks: Sequence[int]
    placement: tuple[int, ...]
    schedules: Sequence[str]

    @property
    def devices(self) -> int:
        return max(self.placement) + 1


def read_fleet(devices: Any, bandwidth: Any = None, latency: Any = None) -> Fleet | None:
    """The devices that text such as ``"8x80GB"`` or ``"64x8xH100"`` describes; None for other values.

    >>> read_fleet("8x80GB").memory, read_fleet("64x8x80GB").nodes
    (80000000000, 64)
    """
    match = _SPEC.fullmatch(devices) if isinstance(devices, str) else None
    if match is None:
        for name, given in (("bandwidth", bandwidth), ("latency", latency)):
            if given is not None:
                raise ValueError(f"{name}: goes with devices that are not there, such as '64x8x80GB'; got {devices!r}")
        return None
    nodes, count = None if match[1] is None else int(match[1]), int(match[2])
    if not count or nodes == 0:
        raise ValueError(f"devices: expected at least one, got {devices!r}")
    return Fleet(nodes, count, *_described(match[3], devices), *_links(bandwidth, latency))


def _described(name: str, devices: str) -> tuple[str, int, float, float]:
    """Name, memory, operations and bytes a second of devices with this name or memory."""
    if name.upper() in _KINDS:
        return name.upper(), *_KINDS[name.upper()]
    _, flops, bandwidth = _KINDS[_GENERIC]
    try:
        return name, read_bytes(name), flops, bandwidth
    except ValueError:
        known = ", ".join(_KINDS)
        raise ValueError(
            f"devices: expected a number and what they have, such as '8x80GB', or one of {known}, as in '8xH100'; or "
            f"nodes and the devices of each, as in '64x8x80GB'; got {devices!r}"
        ) from None


def _links(bandwidth: Any, latency: Any) -> Iterator[Link]:
    for k, usual in enumerate((INSIDE, BETWEEN)):
        speed, delay = _of_link("bandwidth", bandwidth, k), _of_link("latency", latency, k)
        if isinstance(delay, (str, bool)):
            raise TypeError(f"latency: expected seconds, such as 5e-6; got {delay!r}")
        yield Link(
            usual.latency if delay is None else delay,
            usual.bandwidth if speed is None else read_bytes(speed, "bandwidth"),
        )


def _of_link(name: str, given: Any, k: int) -> Any:
    found = given if isinstance(given, (list, tuple)) else [given]
    if len(found) not in (1, 2):
        raise ValueError(f"{name}: expected one for all links, or two: inside a node and between nodes; got {given!r}")
    return found[min(k, len(found) - 1)]


def layouts_of(
    replicas: Mapping[int, int], layers: int, rows: int, chunks: Any, schedules: Sequence[str], least: int = 1
) -> list[Layout]:
    """The layouts to search: those with equal rows for each replica; ValueError if there is none.

    Args:
        replicas: how many there are, by the devices of each.
        layers: several stages on a device are searched if there are enough of these.
        rows, chunks, schedules: of the mini-batch, and those to search.
        least: the number of rows that a micro-batch has at least.
    """
    shares = [(k, times, rows // times) for k, times in replicas.items() if rows % times == 0]
    if not shares:
        choices = ", ".join(f"{times} (of {k} stages)" for k, times in replicas.items())
        raise ValueError(
            f"sample: expected rows that go evenly on the replicas; the devices make replicas {choices}, and the "
            f"mini-batch has {rows} rows"
        )
    given = None if chunks is None else read_chunks(chunks, max(own for _, _, own in shares))
    found = [
        Layout(times, own, [m for m in given or read_chunks(None, own, least) if m <= own], *placed_on)
        for k, times, own in shares
        for placed_on in placed(schedules, k, layers).items()
    ]
    return [each for each in found if each.chunks]


def estimated(profile: Profile, fleet: Fleet) -> Profile:
    """A profile that was not run, with the seconds that a device needs at least for its operations and bytes."""
    return replace(
        profile,
        layers=tuple(_layer(layer, fleet) for layer in profile.layers),
        loss=profile.loss and _layer(profile.loss, fleet),
        others=tuple(estimated(other, fleet) for other in profile.others),
    )


def _layer(layer: LayerProfile, fleet: Fleet) -> LayerProfile:
    moved = layer.parameter_bytes + layer.saved_bytes + layer.output_bytes
    # A backward does twice the operations of a forward: for the inputs, and for the weights.
    forward = max(layer.flops / 3 / (fleet.flops * _FLOPS_REACHED), moved / (fleet.bandwidth * _BANDWIDTH_REACHED))
    return replace(layer, forward_seconds=forward, backward_seconds=2 * forward, backward_input_seconds=forward)

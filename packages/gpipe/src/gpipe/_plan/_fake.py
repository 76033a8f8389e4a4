"""Devices that are not there: bytes are counted on fake tensors, and seconds estimated by a roofline."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from profiler import LayerProfile, Profile

from .._meant import did_you_mean
from ..timeline._hops import Link
from ._arguments import read_bytes

_FLOPS_REACHED, _BANDWIDTH_REACHED = 0.4, 0.7
"""The approximate shares of a data sheet's figures that training reaches."""

INSIDE = Link(latency=10e-6, bandwidth=25e9)
"""Between two devices of a node: about PCI Express 4."""

BETWEEN = Link(latency=10e-6, bandwidth=12.5e9)
"""From a device to another node: 100 Gbit/s for each."""


@dataclass(frozen=True)
class Fake:
    """Some equal devices that are not there.

    Attributes:
        nodes: how many nodes; None where the devices are the stages of one pipe, and nothing is said of nodes.
        count: how many, in each node.
        name: as it was given.
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


def read_fake(devices: Any, bandwidth: Any = None, latency: Any = None) -> Fake | None:
    """The devices that text such as ``"8x80GB"`` or ``"64x8xH100"`` describes; None for other values.

    Args:
        devices: the text.
        bandwidth, latency: of links, as of :func:`gpipe.plan`.

    Raises:
        TypeError, ValueError: text that describes no devices, or links that are none, or links of other devices.

    >>> read_fake("8x80GB").memory, read_fake("64x8x80GB").nodes
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
    return Fake(nodes, count, *_described(match[3], devices), *_links(bandwidth, latency, nodes))


def _described(name: str, devices: str) -> tuple[str, int, float, float]:
    """Of devices that have this name or this memory: name, memory, operations and bytes a second."""
    if name.upper() in _KINDS:
        return name.upper(), *_KINDS[name.upper()]
    _, flops, bandwidth = _KINDS[_GENERIC]
    try:
        return name, read_bytes(name), flops, bandwidth
    except ValueError:
        known = ", ".join(_KINDS)
        raise ValueError(
            f"devices: expected a number and what they have, such as '8x80GB', or one of {known}, as in '8xH100'; or "
            f"nodes and the devices of each, as in '64x8x80GB'; got {devices!r}{did_you_mean(name, _KINDS)}"
        ) from None


def _links(bandwidth: Any, latency: Any, nodes: int | None) -> tuple[Link, Link]:
    """The links inside a node and between nodes; one figure is that of the slowest links that there are."""
    speeds, delays = _pair("bandwidth", bandwidth, nodes), _pair("latency", latency, nodes)
    return _link(INSIDE, speeds[0], delays[0]), _link(BETWEEN, speeds[1], delays[1])


def _pair(name: str, given: Any, nodes: int | None) -> tuple[Any, Any]:
    if not isinstance(given, (list, tuple)):
        given = [given]
    if len(given) not in (1, 2):
        raise ValueError(f"{name}: expected one, or two: inside a node and between nodes; got {given!r}")
    if len(given) == 2:
        return given[0], given[1]
    return (None, given[0]) if nodes is not None and nodes > 1 else (given[0], None)


def _link(link: Link, bandwidth: Any, latency: Any) -> Link:
    return Link(
        link.latency if latency is None else _seconds(latency),
        link.bandwidth if bandwidth is None else read_bandwidth(bandwidth),
    )


def read_bandwidth(given: Any) -> float:
    """Bytes a second, given as a number or as text; bits have to be spelt out.

    Raises:
        TypeError, ValueError: it is neither; or text such as ``"400Gb"``, which may mean either.

    >>> read_bandwidth("50GB/s"), read_bandwidth("400Gbit/s"), read_bandwidth(5e10)
    (50000000000, 50000000000.0, 50000000000)
    """
    if not isinstance(given, str):
        return read_bytes(given, "bandwidth")
    text = given.strip().removesuffix("/s")
    if text.endswith("bit"):
        return read_bytes(text.removesuffix("bit") + "B", "bandwidth") / 8
    if text.endswith("b"):
        raise ValueError(f"bandwidth: expected bytes, as in '50GB', or bits, as in '400Gbit'; got {given!r}")
    return read_bytes(text, "bandwidth")


def _seconds(latency: Any) -> float:
    if isinstance(latency, bool) or not isinstance(latency, (int, float)):
        raise TypeError(f"latency: expected seconds, such as 5e-6; got {latency!r}")
    return float(latency)


def estimated(profile: Profile, fake: Fake) -> Profile:
    """A profile that was counted and not run, with the seconds that a device would need at least for its operations
    and for reading and writing what it keeps.
    """
    counted = any(layer.parting_bytes is not None for layer in profile)
    return replace(
        profile,
        layers=tuple(_layer(layer, fake, whole=counted and layer.parting_bytes is None) for layer in profile.layers),
        loss=profile.loss and _layer(profile.loss, fake, whole=False),
        others=tuple(estimated(other, fake) for other in profile.others),
    )


def _layer(layer: LayerProfile, fake: Fake, *, whole: bool) -> LayerProfile:
    moved = layer.parameter_bytes + layer.saved_bytes + layer.output_bytes
    # A backward does twice the operations of a forward: for the inputs, and for the weights.
    forward = max(layer.flops / 3 / (fake.flops * _FLOPS_REACHED), moved / (fake.bandwidth * _BANDWIDTH_REACHED))
    part = None if whole else forward
    return replace(layer, forward_seconds=forward, backward_seconds=2 * forward, backward_input_seconds=part)

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
"""Shares of what a data sheet says that training reaches, roughly."""

LINK = Link(latency=10e-6, bandwidth=25e9)
"""Between two devices: about PCI Express 4."""


@dataclass(frozen=True)
class Fake:
    """Some equal devices that are not there.

    Attributes:
        count: how many.
        name: as it was given.
        memory: bytes of each.
        flops, bandwidth: operations and bytes a second, by the data sheet.
    """

    count: int
    name: str
    memory: int
    flops: float
    bandwidth: float


FAKE = "fake "
"""What the names of devices that are not there begin with."""

_KINDS = {
    "V100": (32 * 10**9, 125e12, 0.9e12),
    "A100": (80 * 10**9, 312e12, 2.0e12),
    "H100": (80 * 10**9, 989e12, 3.35e12),
    "H200": (141 * 10**9, 989e12, 4.8e12),
}
_GENERIC = "A100"
_SPEC = re.compile(r"\s*(\d+)\s*x\s*(\S.*?)\s*")


def read_fake(devices: Any) -> Fake | None:
    """What text such as ``"8x80GB"`` or ``"8xH100"`` describes; None for anything else.

    Raises:
        ValueError: text that describes no devices.

    >>> read_fake("8x80GB").memory
    80000000000
    """
    match = _SPEC.fullmatch(devices) if isinstance(devices, str) else None
    if match is None:
        return None
    count, name = int(match[1]), match[2]
    if count < 1:
        raise ValueError(f"devices: expected at least one, got {devices!r}")
    if name.upper() in _KINDS:
        return Fake(count, name.upper(), *_KINDS[name.upper()])
    _, flops, bandwidth = _KINDS[_GENERIC]
    try:
        return Fake(count, name, read_bytes(name), flops, bandwidth)
    except ValueError:
        known = ", ".join(_KINDS)
        raise ValueError(
            f"devices: expected a number and what they have, such as '8x80GB', or one of {known}, as in '8xH100'; got "
            f"{devices!r}{did_you_mean(name, _KINDS)}"
        ) from None


def estimated(profile: Profile, fake: Fake) -> Profile:
    """A profile that was counted and not run, with the seconds that a device would need at least for its operations
    and for reading and writing what it keeps.
    """
    return replace(
        profile,
        layers=tuple(_layer(layer, fake) for layer in profile.layers),
        loss=profile.loss and _layer(profile.loss, fake),
        others=tuple(estimated(other, fake) for other in profile.others),
    )


def _layer(layer: LayerProfile, fake: Fake) -> LayerProfile:
    moved = layer.parameter_bytes + layer.saved_bytes + layer.output_bytes
    # A backward does twice the operations of a forward: for the inputs, and for the weights.
    forward = max(layer.flops / 3 / (fake.flops * _FLOPS_REACHED), moved / (fake.bandwidth * _BANDWIDTH_REACHED))
    return replace(layer, forward_seconds=forward, backward_seconds=2 * forward, backward_input_seconds=forward)

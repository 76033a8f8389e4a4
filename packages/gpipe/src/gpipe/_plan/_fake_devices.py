"""Hypothetical devices: bytes are counted on fake tensors, and times come from a roofline model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from profiler import LayerProfile, Profile

from ._arguments import COUNTED, is_size, read_bytes, split_count
from ._links import Links, read_links

_FLOPS_REACHED, _BANDWIDTH_REACHED = 0.4, 0.7
"""The approximate shares of the data sheet figures that training reaches."""

FAKE = "fake "
"""The prefix of the names of hypothetical devices."""

_KINDS = {
    "V100": (32 * 10**9, 125e12, 0.9e12),
    "A100": (80 * 10**9, 312e12, 2.0e12),
    "H100": (80 * 10**9, 989e12, 3.35e12),
    "H200": (141 * 10**9, 989e12, 4.8e12),
}
_GENERIC = "A100"


class FakeDevice(NamedTuple):
    """A hypothetical device.

    Attributes:
        name: its name or memory, as text.
        memory: its bytes.
        flops, bandwidth: operations and bytes per second, according to the data sheet.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class FakeDevices:
    """Hypothetical devices, and their links."""

    each: tuple[FakeDevice, ...]
    links: Links


def read_fake(devices: Any, bandwidth: Any = None, latency: Any = None) -> FakeDevices | None:
    """Return the devices described by text such as ``"8x80GB"``, or by a list of texts; None for other values.

    >>> [device.memory for device in read_fake(["2xH100", "24GB"]).each]
    [80000000000, 80000000000, 24000000000]
    """
    texts = [devices] if isinstance(devices, str) else devices
    if not _are_fake(texts):
        for name, given in (("bandwidth", bandwidth), ("latency", latency)):
            if given is not None:
                raise ValueError(f"{name}: requires hypothetical devices, such as '8x80GB'; got devices={devices!r}")
        return None
    found = tuple(device for text in texts for device in _read_devices(text))
    if not found:
        raise ValueError(f"devices: expected at least one, got {devices!r}")
    return FakeDevices(found, read_links(bandwidth, latency, len(found)))


def _are_fake(texts: Any) -> bool:
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
        return False
    return all(COUNTED.fullmatch(text) or text.strip().upper() in _KINDS or is_size(text) for text in texts)


def _read_devices(text: str) -> list[FakeDevice]:
    """Return the devices with this name or memory, after an optional count."""
    count, name = split_count(text.strip())
    if name.upper() in _KINDS:
        return [FakeDevice(name.upper(), *_KINDS[name.upper()])] * count
    _, flops, bandwidth = _KINDS[_GENERIC]
    try:
        return [FakeDevice(name, read_bytes(name), flops, bandwidth)] * count
    except ValueError:
        known = ", ".join(_KINDS)
        raise ValueError(
            f"devices: expected a count with a memory size, such as '8x80GB', or with one of {known}, as in '8xH100'; "
            f"got {text!r}"
        ) from None


def estimate_profile(profile: Profile, fake: FakeDevice) -> Profile:
    """Return ``profile`` with seconds estimated from the operations and bytes of each layer."""
    return replace(
        profile,
        layers=tuple(_layer(layer, fake) for layer in profile.layers),
        loss=profile.loss and _layer(profile.loss, fake),
        others=tuple(estimate_profile(other, fake) for other in profile.others),
    )


def _layer(layer: LayerProfile, fake: FakeDevice) -> LayerProfile:
    moved = layer.parameter_bytes + layer.saved_bytes + layer.output_bytes
    # A backward does twice the operations of a forward: one part for the inputs, one for the weights.
    forward = max(layer.flops / 3 / (fake.flops * _FLOPS_REACHED), moved / (fake.bandwidth * _BANDWIDTH_REACHED))
    return replace(layer, forward_seconds=forward, backward_seconds=2 * forward, backward_input_seconds=forward)

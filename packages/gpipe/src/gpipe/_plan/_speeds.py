"""Estimate or measure the speeds of devices, relative to the first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from profiler import LayerProfile, Profile

from ._fake_devices import FakeDevice, estimate_profile

_WIDTH, _TURNS = 4096, 10
"""The rows and columns of the matrices that are multiplied, and how often."""


def estimate_speeds(profile: Profile, devices: Sequence[FakeDevice]) -> list[float]:
    """Return the speeds of hypothetical devices on these layers."""
    seconds = {each: sum(layer.seconds or 0.0 for layer in estimate_profile(profile, each)) for each in {*devices}}
    return [seconds[devices[0]] / seconds[each] if seconds[each] else 1.0 for each in devices]


def measure_speeds(devices: Sequence[torch.device], model: nn.Module) -> list[float]:
    """Return the speeds of real devices: of products of matrices, in the dtype of the model's parameters.

    Devices with the same name count as equally fast, and are not measured.
    """
    kinds = [_kind(device) for device in devices]
    if len({*kinds}) == 1:
        return [1.0] * len(devices)
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    seconds = {kind: _seconds(device, dtype) for kind, device in dict(zip(kinds, devices, strict=True)).items()}
    return [seconds[kinds[0]] / seconds[kind] for kind in kinds]


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _seconds(device: torch.device, dtype: torch.dtype) -> float:
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device)
    for turns in (1, _TURNS):  # the first is a warm-up
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        for _ in range(turns):
            matrix @ matrix
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def relative(given: Sequence[float | None], known: Sequence[float]) -> list[float]:
    """Return the speeds relative to the first, as the caller passed them, or else as known.

    >>> relative([2.0, None, 1.0], known=[1.0, 0.5, 1.0])
    [1.0, 0.5, 0.5]
    """
    first = 1.0 if given[0] is None else given[0]
    return [speed if own is None else own / first for own, speed in zip(given, known, strict=True)]


def at_full_speed(profile: Profile, speeds: Sequence[float]) -> Profile:
    """Return the profile of a device with a speed of one, if each layer was measured on one with these ``speeds``.

    A loss is measured with the last layer.
    """
    if {*speeds} == {1.0}:
        return profile
    return replace(
        profile,
        layers=tuple(_scale_seconds(layer, speed) for layer, speed in zip(profile.layers, speeds, strict=True)),
        loss=profile.loss and _scale_seconds(profile.loss, speeds[-1]),
        others=tuple(at_full_speed(other, speeds) for other in profile.others),
    )


def _scale_seconds(layer: LayerProfile, speed: float) -> LayerProfile:
    names = ("forward_seconds", "backward_seconds", "backward_input_seconds")
    known = {name: getattr(layer, name) for name in names}
    return replace(layer, **{name: seconds * speed for name, seconds in known.items() if seconds is not None})

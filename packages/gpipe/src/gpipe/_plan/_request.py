"""The arguments of a plan, checked and parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler import Profile

from ..module._arguments import checked_devices
from ._arguments import LOOPS, rows_of
from ._fleet import FAKE, Fleet, Layout, layouts_of
from ._loss import StepLoss


@dataclass(frozen=True)
class Request:
    """The parsed arguments of :func:`gpipe.plan`.

    Attributes:
        fleet: the devices, if they are not there.
        layouts: the replicas and stages that are searched.
        places: as many devices as a replica has at most; ``meta`` for those that are not there.
        memory: the limit of each of these; None for no limit.
        modes: of checkpointing.
        optimizer: bytes of its state, for each layer.
        profile: of the layers, if one was given.
    """

    layers: nn.Sequential
    sample: Any
    target: Any
    loss: StepLoss
    fleet: Fleet | None
    layouts: Sequence[Layout]
    places: Sequence[torch.device]
    memory: Sequence[int | None]
    modes: Sequence[str]
    optimizer: Sequence[int]
    profile: Profile | None

    @property
    def names(self) -> list[str]:
        return [f"{FAKE}{self.fleet.name}" if self.fleet else str(place) for place in self.places]


def read_layouts(
    devices: Any, fleet: Fleet | None, layers: nn.Sequential, sample: Any, chunks: Any, schedules: Sequence[str]
) -> tuple[list[Layout], list[torch.device]]:
    """The layouts to search, and as many devices as a replica has at most: ``meta`` for those that are not there."""
    replicas = fleet.replicas(len(layers)) if fleet else {}
    places = [torch.device("meta")] * max(replicas) if fleet else _read_places(devices, len(layers))
    # In training, batch norm may refuse a micro-batch of a single row.
    least = 2 if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in layers.modules()) else 1
    # Plain CPUs are a worker for each stage: nothing says which stages would share one.
    several = 0 if torch.device("cpu") in places else len(layers)
    layouts = layouts_of(replicas or {len(places): 1}, several, rows_of(sample), chunks, schedules, least)
    if not layouts:
        raise ValueError(
            f"schedule: {schedules[0]!r} has {LOOPS} stages on each of several devices; it needs as many layers, here "
            f"{len(layers)}, and devices that can be told apart, such as ['cpu:0', 'cpu:1']; got devices={devices!r}"
        )
    return layouts, places[: max(each.devices for each in layouts)]


def _read_places(devices: Any, layers: int) -> list[torch.device]:
    places = checked_devices(devices, layers)
    types = {place.type for place in places}
    if not places:
        raise ValueError("devices: expected at least one, got none")
    if "meta" in types:
        raise ValueError("devices: nothing runs on 'meta'; text such as '8x80GB' stands for devices that are not there")
    if len(types) > 1:
        raise ValueError(f"devices: expected devices of one type, got {', '.join(sorted(types))}; plan for one of them")
    if len(set(places)) < len(places) and torch.device("cpu") not in places:
        raise ValueError(f"devices: expected each one once, got {', '.join(map(str, places))}")
    return places


def read_profile(profile: Any, layers: nn.Sequential, *, timed: bool) -> Profile | None:
    """``profile``, if it is one of these layers, or None; it must have seconds where ``timed``."""
    if not isinstance(profile, (Profile, type(None))):
        raise TypeError(f"profile: expected a profiler.Profile, got {type(profile).__name__}")
    if profile is not None and profile.names != [name for name, _ in layers.named_children()]:
        raise ValueError(f"profile: expected one of these {len(layers)} layers, got one of {', '.join(profile.names)}")
    if profile is not None and timed and not profile.rounds:
        raise ValueError(f"profile: expected one with seconds, got one made on device {profile.device!r}")
    return profile

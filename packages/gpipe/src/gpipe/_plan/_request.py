"""The arguments of a plan, checked and parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler import Profile

from ..module._arguments import checked_devices
from ._arguments import LOOPS, placed, read_chunks, rows_of
from ._fake_devices import FAKE, FakeDevices
from ._loss import StepLoss
from ._planned import Planned


@dataclass(frozen=True)
class Request:
    """The parsed arguments of :func:`gpipe.plan`.

    Attributes:
        fake: the devices, if they are not there.
        places: the devices; ``meta`` for those that are not there.
        placements: the devices of stages that are searched, and the schedules that go with each.
        chunks: the numbers of micro-batches that are searched.
        memory: the limit of each device; None for no limit.
        modes: of checkpointing.
        optimizer: bytes of its state, for each layer.
        profile: of the layers, if one was given.
    """

    model: Planned
    sample: Any
    target: Any
    loss: StepLoss
    fake: FakeDevices | None
    places: Sequence[torch.device]
    placements: Mapping[tuple[int, ...], Sequence[str]]
    chunks: Sequence[int]
    memory: Sequence[int | None]
    modes: Sequence[str]
    optimizer: Sequence[int]
    profile: Profile | None

    @property
    def names(self) -> list[str]:
        return [f"{FAKE}{self.fake.name}" if self.fake else str(place) for place in self.places]


def read_places(devices: Any, fake: FakeDevices | None, layers: int) -> list[torch.device]:
    """As many of the devices as there are ``layers`` at most."""
    if fake:
        return [torch.device("meta")] * min(fake.count, layers)
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


def read_placements(
    devices: Any, places: Sequence[torch.device], layers: int, schedules: Sequence[str]
) -> dict[tuple[int, ...], list[str]]:
    """The placements of stages to search, and the schedules that go with each; ValueError if there is none."""
    # Plain CPUs are a worker for each stage: nothing says which stages would share one.
    several = 0 if torch.device("cpu") in places else layers
    found = placed(schedules, len(places), several)
    if not found:
        raise ValueError(
            f"schedule: {schedules[0]!r} has {LOOPS} stages on each of several devices; it needs as many layers, here "
            f"{layers}, and devices that can be told apart, such as ['cpu:0', 'cpu:1']; got devices={devices!r}"
        )
    return found


def chunks_to_search(chunks: Any, sample: Any, module: nn.Module) -> list[int]:
    """The numbers of micro-batches to search: those given, or some that divide the rows of ``sample``."""
    # In training, batch norm may refuse a micro-batch of a single row.
    least = 2 if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()) else 1
    return read_chunks(chunks, rows_of(sample), least)


def read_profile(profile: Any, names: Sequence[str], *, timed: bool) -> Profile | None:
    """``profile``, if it is one of these layers, or None; it must have seconds where ``timed``."""
    if not isinstance(profile, (Profile, type(None))):
        raise TypeError(f"profile: expected a profiler.Profile, got {type(profile).__name__}")
    if profile is not None and profile.names != [*names]:
        raise ValueError(f"profile: expected one of these {len(names)} layers, got one of {', '.join(profile.names)}")
    if profile is not None and timed and not profile.rounds:
        raise ValueError(f"profile: expected one with seconds, got one made on device {profile.device!r}")
    return profile

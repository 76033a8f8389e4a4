"""The validated and parsed arguments of ``plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler import Profile

from ..module._arguments import check_devices
from ..schedule._named import BREADTH_FIRST
from ._arguments import LOOPS, count_rows, list_placements, read_chunks, read_schedules
from ._fake_devices import FAKE, FakeDevices
from ._host import STAGES, Host, list_looped_placements
from ._loss import StepLoss
from ._planned import Planned


@dataclass(frozen=True)
class Request:
    """The parsed arguments of :func:`gpipe.plan`.

    Attributes:
        fake: the hypothetical devices; None for real ones.
        places: the devices; ``meta`` for hypothetical ones.
        placements: the placements of stages to search, with the schedules for each.
        schedule: the requested schedule; None to search.
        chunks: the numbers of micro-batches to search.
        memory: the limit of each device in bytes; None for no limit.
        speeds: the relative speed of each device; None if the caller does not say.
        modes: the checkpoint modes to search.
        optimizer: the bytes of the optimizer's state per layer.
        profile: the caller's profile of the layers, if any.
        host: the host.
    """

    model: Planned
    sample: Any
    target: Any
    loss: StepLoss
    fake: FakeDevices | None
    places: Sequence[torch.device]
    placements: Mapping[tuple[int, ...], Sequence[str]]
    schedule: str | None
    chunks: Sequence[int]
    memory: Sequence[int | None]
    speeds: Sequence[float | None]
    modes: Sequence[str]
    optimizer: Sequence[int]
    profile: Profile | None
    host: Host

    @property
    def names(self) -> list[str]:
        if self.fake is None:
            return [str(place) for place in self.places]
        return [f"{FAKE}{device.name}" for device in self.fake.each[: len(self.places)]]


def read_places(devices: Any, fake: FakeDevices | None, layers: int) -> list[torch.device]:
    """Return the devices, at most one per layer."""
    if fake:
        return [torch.device("meta")] * min(len(fake.each), layers)
    places = check_devices(devices, layers)
    types = {place.type for place in places}
    if not places:
        raise ValueError("devices: expected at least one, got none")
    if "meta" in types:
        raise ValueError(
            "devices: 'meta' cannot run a model; to plan for hypothetical devices, pass text such as '8x80GB'"
        )
    if len(types) > 1:
        raise ValueError(f"devices: expected devices of one type, got {', '.join(sorted(types))}")
    if len(set(places)) < len(places) and torch.device("cpu") not in places:
        raise ValueError(f"devices: expected each device once, got {', '.join(map(str, places))}")
    return places


def read_placements(
    devices: Any, places: Sequence[torch.device], layers: int, schedule: str | None, host: Host
) -> dict[tuple[int, ...], list[str]]:
    """Return the placements of stages to search, with the schedules for each; ValueError if there are none."""
    if host.parameters:
        return _with_host(places, layers, schedule)
    schedules = read_schedules(schedule)
    # On a plain "cpu" each stage has its own worker, so no two stages share a device.
    several = 0 if torch.device("cpu") in places else layers
    found = list_placements(schedules, len(places), several)
    if not found:
        raise ValueError(
            f"schedule: {schedules[0]!r} runs {LOOPS} stages per device; it needs several distinct devices, such as "
            f"['cpu:0', 'cpu:1'], and a layer per stage; got {layers} layers and devices={devices!r}"
        )
    return found


def _with_host(places: Sequence[torch.device], layers: int, schedule: str | None) -> dict[tuple[int, ...], list[str]]:
    if schedule not in (None, BREADTH_FIRST):
        raise ValueError(f"schedule: with offload=True, only {BREADTH_FIRST!r} is searched; got {schedule!r}")
    found = list_looped_placements(len(places), layers)
    if not found:
        raise ValueError(
            f"offload: expected at least {STAGES[0]} layers per device, one for each stage, since a device holds two "
            f"stages at a time; got {layers} layers and {len(places)} devices"
        )
    return found


def chunks_to_search(chunks: Any, sample: Any, module: nn.Module) -> list[int]:
    """Return the numbers of micro-batches to search: ``chunks``, or some that suit the rows of ``sample``."""
    # In training, batch norm may raise on a micro-batch of a single row.
    least = 2 if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()) else 1
    return read_chunks(chunks, count_rows(sample), least)


def read_profile(profile: Any, names: Sequence[str], *, timed: bool) -> Profile | None:
    """Return ``profile``; raise unless it is None or a profile of these layers, with seconds if ``timed``."""
    if not isinstance(profile, (Profile, type(None))):
        raise TypeError(f"profile: expected a profiler.Profile, got {type(profile).__name__}")
    if profile is not None and profile.names != [*names]:
        raise ValueError(
            f"profile: expected a profile of these {len(names)} layers, got one of {', '.join(profile.names)}"
        )
    if profile is not None and timed and not profile.rounds:
        raise ValueError(f"profile: expected a profile with seconds, got one made on device {profile.device!r}")
    return profile

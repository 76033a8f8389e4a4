"""The arguments of a plan, checked and parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microbatch import Batch
from profiler import Profile

from ..module._arguments import Device, checked_devices
from ._arguments import OptimizerChoice, read_chunks
from ._fake import FAKE, Fake
from ._fleet import FleetLayout, layouts_of


@dataclass(frozen=True)
class Request:
    """The parsed arguments of :func:`gpipe.plan`.

    Attributes:
        layers: of the model.
        sample, target, loss_fn: as of :func:`gpipe.plan`.
        fake: the devices, if they are not there.
        layouts: how they may be shared out among replicas; one if they are there.
        places: as many devices as the most stages take; ``meta`` for those that are not there.
        memory: what each of these may hold; None is any amount.
        modes: those that each stage may have, by the number of stages.
        pieces: whether only some layers of a stage may be computed again.
        schedules: names.
        optimizer: as it was given.
        optimizer_bytes: of its state, for each layer.
        profile: of the layers, if one was given.
        chunks_given: whether numbers of chunks were given, of which none may be left out.
        calibrate: whether to train a copy for some steps.
    """

    layers: nn.Sequential
    sample: Any
    target: Any
    loss_fn: Callable[[Any, Any], Any] | None
    fake: Fake | None
    layouts: list[FleetLayout]
    places: list[torch.device]
    memory: list[int | None]
    modes: dict[int, list[tuple[str, ...]]]
    pieces: bool
    schedules: list[str]
    optimizer: OptimizerChoice
    optimizer_bytes: list[int]
    profile: Profile | None
    chunks_given: bool
    calibrate: bool

    @property
    def names(self) -> list[str]:
        """Those of the devices."""
        return [f"{FAKE}{self.fake.name}" if self.fake else str(place) for place in self.places]


def rows_of(sample: Any) -> int:
    """The rows of a mini-batch: those of the tensor that has the fewest, as a profile takes them."""
    return min(len(tensor) for tensor in Batch(sample))


def read_layouts(
    devices: Iterable[Device] | str, fake: Fake | None, layers: int, rows: int, chunks: Any, checkpoint: Any
) -> tuple[list[FleetLayout], list[torch.device]]:
    """The layouts to look at, and as many devices as the most stages take: ``meta`` for those that are not there.

    Raises:
        TypeError, ValueError: there is no device, or one that nothing can run on, or no layout.
    """
    if fake:
        layouts = layouts_of(fake, layers, rows, chunks, checkpoint)
        return layouts, [torch.device("meta")] * layouts[-1].stages
    places = checked_devices(devices, layers)
    if not places:
        raise ValueError("devices: expected at least one, got none")
    if any(place.type == "meta" for place in places):
        raise ValueError("devices: nothing runs on 'meta'; text such as '8x80GB' stands for devices that are not there")
    return [FleetLayout(1, len(places), rows, tuple(read_chunks(chunks, rows)))], places


def read_profile(profile: Any, layers: nn.Sequential) -> Profile | None:
    """``profile``, if it is one of these layers, or None.

    Raises:
        TypeError, ValueError: it is anything else.
    """
    if not isinstance(profile, (Profile, type(None))):
        raise TypeError(f"profile: expected a profiler.Profile, got {type(profile).__name__}")
    if profile is not None and profile.names != [name for name, _ in layers.named_children()]:
        raise ValueError(f"profile: expected one of these {len(layers)} layers, got one of {', '.join(profile.names)}")
    return profile

"""The arguments of a plan, checked and parsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microbatch import Batch
from profiler import Profile

from ..module._arguments import checked_devices
from ._arguments import read_chunks, read_modes
from ._fleet import FAKE, Fleet, Layout, layouts_of


@dataclass(frozen=True)
class Request:
    """The parsed arguments of :func:`gpipe.plan`.

    Attributes:
        layers: of the model.
        sample, target, loss_fn: as of :func:`gpipe.plan`.
        fleet: the devices, if they are not there.
        layouts: how they may be shared out among replicas; one if they are there.
        places: as many devices as the most stages take; ``meta`` for those that are not there.
        memory: what each of these may hold; None is any amount.
        pieces: whether only some layers of a stage may be computed again.
        schedules: names.
        optimizer: bytes of its state, for each layer.
        profile: of the layers, if one was given.
    """

    layers: nn.Sequential
    sample: Any
    target: Any
    loss_fn: Callable[[Any, Any], Any] | None
    fleet: Fleet | None
    layouts: Sequence[Layout]
    places: Sequence[torch.device]
    memory: Sequence[int | None]
    pieces: bool
    schedules: Sequence[str]
    optimizer: Sequence[int]
    profile: Profile | None

    @property
    def names(self) -> list[str]:
        """Those of the devices."""
        return [f"{FAKE}{self.fleet.name}" if self.fleet else str(place) for place in self.places]

    @property
    def rows(self) -> int:
        """The rows of the mini-batch: those of the tensor that has the fewest, as a profile takes them."""
        return min(len(tensor) for tensor in Batch(self.sample))


def read_layouts(
    devices: Any, fleet: Fleet | None, layers: nn.Sequential, sample: Any, chunks: Any, checkpoint: Any
) -> tuple[list[Layout], list[torch.device]]:
    """The layouts to look at, and as many devices as the most stages take: ``meta`` for those that are not there.

    Raises:
        TypeError, ValueError: there is no device, or one that nothing can run on, or no layout.
    """
    rows = min(len(tensor) for tensor in Batch(sample))
    # In training, batch norm may refuse a micro-batch of a single row.
    least = 2 if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in layers.modules()) else 1
    if fleet:
        layouts = layouts_of(fleet, len(layers), rows, chunks, checkpoint, least)
        return layouts, [torch.device("meta")] * layouts[-1].stages
    places = checked_devices(devices, len(layers))
    if not places:
        raise ValueError("devices: expected at least one, got none")
    if any(place.type == "meta" for place in places):
        raise ValueError("devices: nothing runs on 'meta'; text such as '8x80GB' stands for devices that are not there")
    return [Layout(1, rows, read_chunks(chunks, rows, least), read_modes(checkpoint, len(places)))], places


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

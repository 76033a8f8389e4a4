"""Move tensors to the device that computes with them, for code that runs once for the full mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._torch import function_modes
from ..engine._offloaded import Offload, dtype_of_guest
from ._between import Between
from ._tree import changed


class Moved:
    """Copies of tensors on the devices of stages.

    A copy replaces its tensor permanently, because it may be modified in place.

    Args:
        devices: the device of each stage.
        offload: whether parameters are on the host, and in which dtype stages compute.

    Attributes:
        is_needed: whether tensors may be on several devices.
    """

    def __init__(self, devices: Sequence[torch.device], offload: Offload) -> None:
        self.is_needed = bool(offload) or len({*devices}) > 1
        self._devices, self._offload = devices, offload
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def here(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return ``tensor`` on ``device``."""
        if not self.is_needed:
            return tensor
        while (known := self._copies.get(id(tensor))) is not None and known[0] is tensor:
            tensor = known[1]
        copy = self.made(tensor, device).to(dtype_of_guest(tensor, self._offload))
        if copy is not tensor:
            self._copies[id(tensor)] = tensor, copy
        return copy

    def made(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return ``tensor``, which an operation on ``device`` has computed, on it. It may have set a different one."""
        if not self.is_needed or tensor.device == device:
            return tensor
        if tensor.device not in self._devices and not (self._offload and tensor.device.type == "cpu"):
            return tensor
        return tensor if not tensor.dim() and tensor.device.type == "cpu" else tensor.to(device)


class OnLastDevice:
    """Computes the operations of code that runs after a pipeline on the device of the last stage.

    The model's outputs are there, but the weight of a head may be on the first device, where the embedding is.
    """

    def __init__(self, devices: Sequence[torch.device], offload: Offload) -> None:
        self.device, self._moved = devices[-1], Moved(devices, offload)
        self.is_needed = self._moved.is_needed

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = changed(args, self._here), changed(kwargs, self._here)
        return function(*found[0], **found[1])

    def _here(self, tensor: Tensor) -> Tensor:
        return self._moved.here(tensor, self.device)

    def read(self, tensor: Tensor) -> None: ...


def on_last_device(devices: Sequence[torch.device], offload: Offload) -> AbstractContextManager[Any]:
    """Return a context whose operations compute on the last device."""
    looks = OnLastDevice(devices, offload)
    return Between(looks) if looks.is_needed else nullcontext()


@contextmanager
def where_they_are() -> Iterator[None]:
    """Compute where the tensors are in this context, as the stages of a run do."""
    found = (each for each in function_modes() if isinstance(each, Between) and isinstance(each.looks, OnLastDevice))
    mode = next(found, None)
    with nullcontext() if mode is None else mode.off():
        yield

"""Move tensors to the device that computes with them, for code that runs once for the full mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import saved_tensors_hooks
from ..engine._offloaded import Offload, dtype_of_guest
from ..values._leaves import get_tensors, version
from ._between import Between, is_checkpoint
from ._tree import map_tree


class Places(NamedTuple):
    """The places of the tensors of a model.

    Attributes:
        devices: the device of each stage.
        offload: whether parameters are on the host, and in which dtype stages compute.
    """

    devices: Sequence[torch.device]
    offload: Offload

    @property
    def are_several(self) -> bool:
        return bool(self.offload) or len({*self.devices}) > 1

    def have(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in one of them, and operations of other devices cannot use it."""
        if not tensor.dim() and tensor.device.type == "cpu":
            return False
        return tensor.device in self.devices or (bool(self.offload) and tensor.device.type == "cpu")

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return ``tensor`` for an operation of a stage on ``device``. Its gradient reaches it, even in ``no_grad``."""
        with torch.enable_grad() if tensor.requires_grad else nullcontext():
            there = device if self.have(tensor) else tensor.device
            return tensor.to(there, dtype_of_guest(tensor, self.offload))


class Moved:
    """Copies of tensors on the devices of stages.

    A copy replaces its tensor permanently, because it may be modified in place.
    """

    def __init__(self, places: Places) -> None:
        self._places, self.is_needed = places, places.are_several
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def here(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return ``tensor`` on ``device``."""
        if not self.is_needed:
            return tensor
        while (known := self._copies.get(id(tensor))) is not None and known[0] is tensor:
            tensor = known[1]
        copy = self._places.move(tensor, device)
        if copy is not tensor:
            self._copies[id(tensor)] = tensor, copy
        return copy

    def place(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return ``tensor``, which an operation on ``device`` has computed, on it. It may have set a different one."""
        return tensor.to(device) if self.is_needed and self._places.have(tensor) else tensor


class OnLastDevice:
    """Computes the operations of code that runs after a pipeline on the device of the last stage.

    The model's outputs are there, but the weight of a head may be on the first device, where the embedding is, or on
    the host. Only operations that combine tensors of several devices are changed, which would fail otherwise. Others,
    such as those of an optimizer or of ``state_dict``, compute where their tensors are.
    """

    is_of_forward = False

    def __init__(self, places: Places) -> None:
        self.device, self._places = places.devices[-1], places
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}  # of parameters, which are often used several times

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = get_tensors((args, kwargs))
        if not self._combines(tensors):
            return function(*args, **kwargs)
        if is_checkpoint(saved_tensors_hooks()):
            raise RuntimeError(
                "a forward that was set on the pipe, or a method of the model, combines tensors of several devices in "
                "torch.utils.checkpoint, whose recomputation would not move them; move them to the device of the "
                "pipe's output before, with tensor.to(...)"
            )
        moved: list[tuple[Tensor, int]] = []

        def here(tensor: Tensor) -> Tensor:
            found = self._here(tensor)
            if found is not tensor:
                moved.append((found, version(found)))
            return found

        output = function(*map_tree(args, here), **map_tree(kwargs, here))
        if any(version(copy) != before for copy, before in moved):
            raise RuntimeError(
                "a forward that was set on the pipe, or a method of the model, changes a tensor in place with values "
                "of another device; the change would be lost; move the values to the tensor's device first, or the "
                f"tensor to {self.device}"
            )
        return output

    def _combines(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether an operation with these ``tensors`` would fail, as they have several devices or dtypes."""
        if len(tensors) < 2:
            return False
        if not isinstance(offload := self._places.offload, torch.dtype):
            return len({tensor.device for tensor in tensors if self._places.have(tensor)}) > 1
        # Stages return this dtype, and parameters have another one.
        returned = any(
            each.device == self.device and each.dtype == offload and not isinstance(each, nn.Parameter)
            for each in tensors
        )
        return returned and any(map(self._is_elsewhere, tensors))

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        is_moved = tensor.device != self.device and self._places.have(tensor)
        return is_moved or dtype_of_guest(tensor, self._places.offload) != tensor.dtype

    def _here(self, tensor: Tensor) -> Tensor:
        if not self._is_elsewhere(tensor):
            return tensor
        known = self._copies.get(id(tensor))
        if known is not None and known[0] is tensor and known[1] == version(tensor):
            return known[2]
        copy = self._places.move(tensor, self.device)
        if isinstance(tensor, nn.Parameter):
            self._copies[id(tensor)] = tensor, version(tensor), copy
        return copy

    def read(self, tensor: Tensor) -> None: ...


def on_last_device(devices: Sequence[torch.device], offload: Offload) -> AbstractContextManager[Any]:
    """Return a context whose operations compute on the last device."""
    places = Places(devices, offload)
    return Between(OnLastDevice(places)) if places.are_several else nullcontext()

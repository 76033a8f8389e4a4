"""Move tensors to the device that computes with them, for code that runs once for the full mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import function_modes, saved_tensors_hooks
from ..engine._offloaded import Offload, dtype_of_guest
from ..values._leaves import tensors_of, version
from ._between import CHECKPOINT, Between
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
        is_here = self._is_here(tensor, device)
        copy = _moved(tensor, tensor.device if is_here else device, self._offload)
        if copy is not tensor:
            self._copies[id(tensor)] = tensor, copy
        return copy

    def made(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return ``tensor``, which an operation on ``device`` has computed, on it. It may have set a different one."""
        return tensor if not self.is_needed or self._is_here(tensor, device) else tensor.to(device)

    def _is_here(self, tensor: Tensor, device: torch.device) -> bool:
        """Return whether an operation on ``device`` can use ``tensor`` as it is."""
        if tensor.device == device:
            return True
        if tensor.device not in self._devices and not (self._offload and tensor.device.type == "cpu"):
            return True
        return not tensor.dim() and tensor.device.type == "cpu"


def _moved(tensor: Tensor, device: torch.device, offload: Offload) -> Tensor:
    """Return ``tensor`` on ``device``, in the dtype of stages. Its gradient reaches it, even if made in ``no_grad``."""
    with torch.enable_grad() if tensor.requires_grad else nullcontext():
        return tensor.to(device, dtype_of_guest(tensor, offload))


class OnLastDevice:
    """Computes the operations of code that runs after a pipeline on the device of the last stage.

    The model's outputs are there, but the weight of a head may be on the first device, where the embedding is, or on
    the host. Only operations that combine tensors of several devices are changed, which would fail otherwise. Others,
    such as those of an optimizer or of ``state_dict``, compute where their tensors are.
    """

    def __init__(self, devices: Sequence[torch.device], offload: Offload) -> None:
        self.device, self._devices, self._offload = devices[-1], devices, offload
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}  # of parameters, which are often used several times

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of((args, kwargs))
        if not self._combines(tensors):
            return function(*args, **kwargs)
        hooks: Any = saved_tensors_hooks()
        if hooks is not None and hooks[0].__module__ == CHECKPOINT:
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

        output = function(*changed(args, here), **changed(kwargs, here))
        if any(version(copy) != before for copy, before in moved):
            raise RuntimeError(
                "a forward that was set on the pipe, or a method of the model, changes a tensor in place with values "
                f"of another device; the change would be lost; move the values to the tensor's device first, or the "
                f"tensor to {self.device}"
            )
        return output

    def _combines(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether an operation with these ``tensors`` would fail, as they have several devices or dtypes."""
        if len(tensors) < 2:
            return False
        is_last = [tensor.device == self.device and not isinstance(tensor, nn.Parameter) for tensor in tensors]
        if isinstance(self._offload, torch.dtype):  # stages return this dtype, and parameters have another one
            is_last = [
                is_own and tensor.dtype == self._offload for is_own, tensor in zip(is_last, tensors, strict=True)
            ]
            return any(is_last) and any(self._is_elsewhere(tensor) for tensor in tensors)
        return len({tensor.device for tensor in tensors if self._is_of_stage(tensor)}) > 1

    def _is_of_stage(self, tensor: Tensor) -> bool:
        """Return whether the device of ``tensor`` matters, and is one of a stage or the host of its parameters."""
        if not tensor.dim() and tensor.device.type == "cpu":
            return False
        return tensor.device in self._devices or (bool(self._offload) and tensor.device.type == "cpu")

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        is_moved = self._is_of_stage(tensor) and tensor.device != self.device
        return is_moved or dtype_of_guest(tensor, self._offload) != tensor.dtype

    def _here(self, tensor: Tensor) -> Tensor:
        if not self._is_elsewhere(tensor):
            return tensor
        known = self._copies.get(id(tensor))
        if known is not None and known[0] is tensor and known[1] == version(tensor):
            return known[2]
        copy = _moved(tensor, self.device if self._is_of_stage(tensor) else tensor.device, self._offload)
        if isinstance(tensor, nn.Parameter):
            self._copies[id(tensor)] = tensor, version(tensor), copy
        return copy

    def read(self, tensor: Tensor) -> None: ...


def on_last_device(devices: Sequence[torch.device], offload: Offload) -> AbstractContextManager[Any]:
    """Return a context whose operations compute on the last device."""
    is_needed = bool(offload) or len({*devices}) > 1
    return Between(OnLastDevice(devices, offload)) if is_needed else nullcontext()


@contextmanager
def where_they_are() -> Iterator[None]:
    """Compute where the tensors are in this context, as the stages of a run do."""
    found = (each for each in function_modes() if isinstance(each, Between) and isinstance(each.looks, OnLastDevice))
    mode = next(found, None)
    with nullcontext() if mode is None else mode.off():
        yield

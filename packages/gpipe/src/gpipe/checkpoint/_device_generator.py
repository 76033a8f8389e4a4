"""Save and restore the RNG state of an accelerator, so that a recomputation draws the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from streams import has_streams


class DeviceGenerator:
    """The current state of the generator of ``device``, if torch can get and set it."""

    __slots__ = ("_device", "_module", "_state")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = get_device_module(device)
        # Read before the forward draws. This does not synchronize the device, because the host keeps the state.
        self._state = None if self._module is None else self._module.get_rng_state(device)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Temporarily reset the generator to that state."""
        if self._state is None:
            yield
            return
        # Later forwards have advanced the generator, and the next ones continue from there.
        now: Tensor = self._module.get_rng_state(self._device)
        try:
            self._module.set_rng_state(self._state, self._device)
            yield
        finally:
            self._module.set_rng_state(now, self._device)

    def expect_repeats(self, device: torch.device) -> None:
        """Raise RuntimeError if a recomputation cannot repeat random numbers drawn on ``device``."""
        # Meta tensors have no values to draw.
        if device.type == "meta" or (self._state is not None and _is_same(device, self._device)):
            return
        raise RuntimeError(
            f"a layer draws random numbers on {str(device)!r} in a checkpointed forward, and its recomputation would "
            f"draw others: only the generator of the partition's own device, {str(self._device)!r}, is rewound, and "
            "that if torch has its get_rng_state and set_rng_state; use checkpoint='never', or draw on the CPU"
        )


def _is_same(device: torch.device, own: torch.device) -> bool:
    # Operations may specify only a device type. Then they use the current device, which is the stage's device.
    return device.type == own.type and device.index in (None, own.index)


def get_device_module(device: torch.device) -> Any:
    """Return the module with ``get_rng_state`` and ``set_rng_state``, such as ``torch.cuda``, or None."""
    module = getattr(torch, device.type, None) if has_streams(device) else None
    return module if hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state") else None

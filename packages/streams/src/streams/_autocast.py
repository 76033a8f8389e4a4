"""The autocast state of a thread: which device types cast, to what, and whether weights' casts are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

DEVICE_TYPES: tuple[str, ...] = tuple(torch._C._autocast_supported_devices())
_NONE_ENABLED = (False,) * len(DEVICE_TYPES)


class Autocast(NamedTuple):
    """The state, one entry of ``enabled`` and ``dtypes`` for each of ``DEVICE_TYPES``."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool
    nested: bool


def read() -> Autocast:
    """The state of this thread."""
    # There is no way to ask for the depth, only to change it and see.
    nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    # The quick question alone will not do: it forgets some device types (mps, maia).
    some = nested or torch._C._is_any_autocast_enabled()
    enabled = tuple(map(torch.is_autocast_enabled, DEVICE_TYPES)) if some else _NONE_ENABLED
    # Dtypes count even where nothing is enabled: a later `torch.autocast(type)` without a dtype takes them.
    dtypes = tuple(map(torch.get_autocast_dtype, DEVICE_TYPES))
    return Autocast(enabled, dtypes, torch.is_autocast_cache_enabled(), nested)


def enter(state: Autocast) -> Callable[[], None] | None:
    """Give this thread ``state``; the way back, or ``None`` if there was nothing to change."""
    found = read()
    if found == state:
        return None
    _write(found, state)
    if state.nested:
        torch.autocast_increment_nesting()

    def undo() -> None:
        # As the end of any autocast block: a kept cast must not outlive the last block, for the weight may change.
        if state.nested and torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _write(state, found)

    return undo


def _write(found: Autocast, wanted: Autocast) -> None:
    for i in _differences(found.enabled, wanted.enabled):
        torch.set_autocast_enabled(DEVICE_TYPES[i], wanted.enabled[i])
    for i in _differences(found.dtypes, wanted.dtypes):
        torch.set_autocast_dtype(DEVICE_TYPES[i], wanted.dtypes[i])
    torch.set_autocast_cache_enabled(wanted.cache)


def _differences(found: Sequence[object], wanted: Sequence[object]) -> list[int]:
    if found == wanted:
        return []
    return [i for i, (old, new) in enumerate(zip(found, wanted, strict=True)) if old != new]

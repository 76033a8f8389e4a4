"""The switches of a thread: of autograd, apart from grad and inference mode, and of torch functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import _C

Flags: TypeAlias = tuple[bool, bool, bool, bool, bool]
"""Whether a backward may run on the threads of devices (``torch.autograd.set_multithreading_enabled``), forward-mode AD
computes tangents, views are computed again after an in-place change, ``__torch_function__`` acts, and not even that of
modes acts (``DisableTorchFunction``)."""


def read() -> Flags:
    """The switches of this thread."""
    return (
        _C._is_multithreading_enabled(),
        _C._is_fwd_grad_enabled(),
        _C._is_view_replay_enabled(),
        _C._is_torch_function_enabled(),
        _C._is_torch_function_all_disabled(),
    )


def enter(flags: Flags) -> Callable[[], None]:
    """Give this thread ``flags``; the way back."""
    found = read()
    if found != flags:
        _write(flags)
    # Even if there was nothing to change: what happens inside may change them for good.
    return partial(_write, found)


def _write(flags: Flags) -> None:
    multithreading, forward_ad, view_replay, enabled, all_disabled = flags
    _C._set_multithreading_enabled(multithreading)
    _C._set_fwd_grad_enabled(forward_ad)
    _C._set_view_replay_enabled(view_replay)
    states = _C._TorchFunctionState  # type: ignore[attr-defined]
    _C._set_torch_function_state(  # type: ignore[attr-defined]
        states.ENABLED if enabled else states.ALL_DISABLED if all_disabled else states.SUBCLASSES_DISABLED
    )

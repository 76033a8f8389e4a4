"""The settings that torch and Python keep for each thread: for each a function that reads it, and one that sets it.

A function that sets returns a function that restores the setting, or None if nothing was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import _C
from torch.overrides import TorchFunctionMode

WayBack: TypeAlias = Callable[[], object]

Flags: TypeAlias = tuple[bool, bool, bool, bool, bool]
"""Whether a backward may run on the threads of devices (``torch.autograd.set_multithreading_enabled``), forward-mode AD
computes tangents, views are computed again after an in-place change, ``__torch_function__`` acts, and not even that of
modes acts (``DisableTorchFunction``)."""

Modes: TypeAlias = tuple[TorchFunctionMode, ...]
"""The torch function modes, the outermost first; the default device is one of them."""

Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | str | None
"""The pair of saved-tensor hooks that acts, or why hooks are forbidden here, or ``None``. They nest, but only the
innermost pair acts, so that is what another thread needs."""

DEVICE_TYPES: tuple[str, ...] = tuple(_C._autocast_supported_devices())
_NONE_ENABLED = (False,) * len(DEVICE_TYPES)


class Autocast(NamedTuple):
    """The autocast state, one entry of ``enabled`` and ``dtypes`` for each of ``DEVICE_TYPES``."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool
    nested: bool


def enter_grad_mode(mode: bool) -> WayBack:
    """Switch grad mode on or off."""
    # Return a way to restore it even if nothing is changed here: code inside may change it and not restore it.
    way_back = partial(_C._set_grad_enabled, torch.is_grad_enabled())
    _C._set_grad_enabled(mode)
    return way_back


def enter_inference_mode(mode: bool) -> WayBack | None:
    """Switch inference mode on or off."""
    if torch.is_inference_mode_enabled() == mode:
        return None
    guard = _C._InferenceMode(mode)
    guard.__enter__()  # type: ignore[no-untyped-call]
    return partial(guard.__exit__, None, None, None)


def read_flags() -> Flags:
    """The switches of autograd, apart from grad and inference mode, and of torch functions."""
    return (
        _C._is_multithreading_enabled(),
        _C._is_fwd_grad_enabled(),
        _C._is_view_replay_enabled(),
        _C._is_torch_function_enabled(),
        _C._is_torch_function_all_disabled(),
    )


def enter_flags(flags: Flags) -> WayBack:
    """Set the ``flags`` of this thread."""
    found = read_flags()
    if found != flags:
        _write_flags(flags)
    # As for the grad mode.
    return partial(_write_flags, found)


def _write_flags(flags: Flags) -> None:
    multithreading, forward_ad, view_replay, enabled, all_disabled = flags
    _C._set_multithreading_enabled(multithreading)
    _C._set_fwd_grad_enabled(forward_ad)
    _C._set_view_replay_enabled(view_replay)
    states = _C._TorchFunctionState  # type: ignore[attr-defined]
    _C._set_torch_function_state(  # type: ignore[attr-defined]
        states.ENABLED if enabled else states.ALL_DISABLED if all_disabled else states.SUBCLASSES_DISABLED
    )


def read_autocast() -> Autocast:
    """The device types that cast, to which dtype, and whether casts of weights are cached."""
    # The depth of nesting can only be read by changing it.
    nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    # _is_any_autocast_enabled() alone is not enough: it ignores some device types (mps, maia).
    some = nested or _C._is_any_autocast_enabled()
    enabled = tuple(map(torch.is_autocast_enabled, DEVICE_TYPES)) if some else _NONE_ENABLED
    # Dtypes matter even if nothing is enabled: a later `torch.autocast(type)` without a dtype uses them.
    dtypes = tuple(map(torch.get_autocast_dtype, DEVICE_TYPES))
    return Autocast(enabled, dtypes, torch.is_autocast_cache_enabled(), nested)


def enter_autocast(state: Autocast, *, keeps_casts: bool = False) -> WayBack | None:
    """Set the autocast ``state`` of this thread; see :meth:`Context.applied` for ``keeps_casts``."""
    found = read_autocast()
    if found == state:
        return None
    _write_autocast(found, state)
    if state.nested:
        torch.autocast_increment_nesting()

    def undo() -> None:
        # As at the end of any autocast block: cached casts must not outlive the last block, since weights may change.
        if state.nested and torch.autocast_decrement_nesting() == 0 and not keeps_casts:
            torch.clear_autocast_cache()
        _write_autocast(state, found)

    return undo


def _write_autocast(found: Autocast, wanted: Autocast) -> None:
    for i in _differences(found.enabled, wanted.enabled):
        torch.set_autocast_enabled(DEVICE_TYPES[i], wanted.enabled[i])
    for i in _differences(found.dtypes, wanted.dtypes):
        torch.set_autocast_dtype(DEVICE_TYPES[i], wanted.dtypes[i])
    torch.set_autocast_cache_enabled(wanted.cache)


def _differences(found: Sequence[object], wanted: Sequence[object]) -> list[int]:
    if found == wanted:
        return []
    return [i for i, (old, new) in enumerate(zip(found, wanted, strict=True)) if old != new]


def read_hooks() -> Hooks:
    """The saved-tensor hooks of this thread that are in effect."""
    pair = _C._autograd._top_saved_tensors_default_hooks(True)
    return pair if pair is not None else _C._autograd._saved_tensors_hooks_get_disabled_error_message()


def enter_hooks(hooks: Hooks) -> WayBack | None:
    """Make ``hooks`` the only saved-tensor hooks of this thread."""
    if read_hooks() == hooks:
        return None
    found = _take_hooks()
    _put_hooks(hooks)

    def undo() -> None:
        _take_hooks()
        for each in found:
            _put_hooks(each)

    return undo


def _take_hooks() -> list[Hooks]:
    """Remove all saved-tensor hooks, and return them, the innermost last."""
    taken: list[Hooks] = []
    while (hooks := read_hooks()) is not None:
        taken.append(hooks)
        if isinstance(hooks, str):
            _C._autograd._saved_tensors_hooks_enable()
        else:
            _C._autograd._pop_saved_tensors_default_hooks()
    return taken[::-1]


def _put_hooks(hooks: Hooks) -> None:
    if isinstance(hooks, str):
        _C._autograd._saved_tensors_hooks_disable(hooks)
    elif hooks is not None:
        _C._autograd._push_saved_tensors_default_hooks(*hooks)


def read_modes() -> Modes:
    """The torch function modes of this thread."""
    return tuple(map(_C._get_function_stack_at, range(_C._len_torch_function_stack())))


def enter_modes(modes: Modes) -> WayBack | None:
    """Make ``modes`` the torch function modes of this thread."""
    found = read_modes() if _C._len_torch_function_stack() else ()
    if found == modes:
        return None
    _replace_modes(modes)
    return partial(_replace_modes, found)


def _replace_modes(modes: Modes) -> None:
    # Not by `with mode`: its __enter__ may have other effects, and that of a default device reorders the stack.
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def enter_variables(variables: Variables) -> WayBack | None:
    """Set the context ``variables`` on this thread; others do not change.

    They are set one by one, because a ``contextvars.Context`` cannot be entered by two threads at a time.
    """
    tokens = [(var, var.set(value)) for var, value in variables.items() if var.get(_UNSET) is not value]
    return partial(_reset_variables, tokens) if tokens else None


_UNSET = object()


def _reset_variables(tokens: list[tuple[ContextVar[Any], Token[Any]]]) -> None:
    for var, token in reversed(tokens):
        var.reset(token)

"""Load models whose weights are offloaded to the host or disk, and moved to a device by hooks for each call.

Such a hook, an ``AlignDevicesHook`` of accelerate, is in ``module._hf_hook``. It wraps the forward of its module, and
the original forward is in ``module._old_forward``. A pipe chooses its own devices, so it removes these hooks, and its
stages load the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ._initializer import Initializer
from ._model import Layers, modules_of_layer

_log = logging.getLogger("gpipe")


def take_off_hooks(model: Any) -> Initializer | None:
    """Remove the hooks of ``model`` that move weights and inputs between devices.

    Returns:
        An initializer that loads the offloaded weights layer by layer; None if no weights are offloaded.
    """
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    hooked = [(module, hooks) for module in modules if (hooks := _moving(module))]
    if not hooked:
        return None
    loads: dict[int, Callable[[], Tensor]] = {}
    for module, hooks in hooked:
        for hook in hooks:
            loads.update({id(tensor): partial(_fetch, hook, name) for name, tensor in _find_offloaded(module, hook)})
        _take_off(module)
    _log.info(
        "hooks of %s that move weights between devices are removed: the stages of the pipe hold %s",
        type(model).__name__,
        "the weights, which are loaded from the offloaded copies" if loads else "the weights",
    )
    if not loads:
        return None
    # While they are offloaded, shared parameters are separate parameters on meta.
    for module in modules:
        if callable(getattr(type(module), "tie_weights", None)):
            module.tie_weights()  # type: ignore[operator]
    return partial(_load, loads)


def _moving(module: nn.Module) -> list[Any]:
    """Return the hooks of ``module`` if they only move weights, inputs and outputs; otherwise an empty list."""
    hook = vars(module).get("_hf_hook")
    hooks = [*getattr(hook, "hooks", [hook])]
    moves = all(hasattr(each, "execution_device") and hasattr(each, "weights_map") for each in hooks)
    return hooks if moves and "_old_forward" in vars(module) else []


def _find_offloaded(module: nn.Module, hook: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(hook.weights_map, Mapping):
        recurse = bool(getattr(hook, "place_submodules", False))
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            if tensor.is_meta:
                yield name, tensor


def _fetch(hook: Any, name: str) -> Tensor:
    value: Tensor = hook.weights_map[name]
    return value


def _take_off(module: nn.Module) -> None:
    own = vars(module)
    before = own.pop("_old_forward")
    del own["_hf_hook"], own["forward"]
    if getattr(before, "__func__", None) is not type(module).forward:
        own["forward"] = before
    for name in ("to", "cuda"):  # these raise an error for a model with hooks
        if hasattr(own.get(name), "__wrapped__"):
            del own[name]


def _load(loads: Mapping[int, Callable[[], Tensor]], layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
    for owned in modules_of_layer(layers, name):
        for _, tensor in owned.tensors():
            if id(tensor) in fresh and id(tensor) in loads:
                tensor.copy_(loads[id(tensor)]())

"""Models whose weights hooks keep elsewhere, on the host or on disk, and move to a device for each call of a module.

Such a hook, an ``AlignDevicesHook`` of accelerate, is in ``module._hf_hook``, and wraps the forward of its module; what
it was is in ``module._old_forward``. A pipe has devices of its own, so these hooks come off, and stages load the
weights.
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
    """Take hooks off the modules of ``model`` that move weights and inputs to other devices.

    Returns:
        An initializer that loads the weights that the hooks kept, layer by layer; None if there are none.
    """
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    hooked = [(module, hooks) for module in modules if (hooks := _moving(module))]
    if not hooked:
        return None
    loads: dict[int, Callable[[], Tensor]] = {}
    for module, hooks in hooked:
        for hook in hooks:
            loads.update({id(tensor): partial(_loaded, hook, name) for name, tensor in _kept_by(module, hook)})
        _take_off(module)
    _log.info(
        "hooks of %s that move weights between devices are taken off: the stages of the pipe hold %s",
        type(model).__name__,
        "the weights, which are loaded from where the hooks kept them" if loads else "the weights",
    )
    if not loads:
        return None
    # While they are kept elsewhere, shared parameters are separate ones on meta.
    for module in modules:
        if callable(getattr(type(module), "tie_weights", None)):
            module.tie_weights()  # type: ignore[operator]
    return partial(_load, loads)


def _moving(module: nn.Module) -> list[Any]:
    """The hooks of ``module``, if all they do is to move weights, inputs and outputs."""
    hook = vars(module).get("_hf_hook")
    hooks = [*getattr(hook, "hooks", [hook])]
    moves = all(hasattr(each, "execution_device") and hasattr(each, "weights_map") for each in hooks)
    return hooks if moves and "_old_forward" in vars(module) else []


def _kept_by(module: nn.Module, hook: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(hook.weights_map, Mapping):
        recurse = bool(getattr(hook, "place_submodules", False))
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            if tensor.is_meta:
                yield name, tensor


def _loaded(hook: Any, name: str) -> Tensor:
    value: Tensor = hook.weights_map[name]
    return value


def _take_off(module: nn.Module) -> None:
    own = vars(module)
    before = own.pop("_old_forward")
    del own["_hf_hook"], own["forward"]
    if getattr(before, "__func__", None) is not type(module).forward:
        own["forward"] = before
    for name in ("to", "cuda"):  # which refuse to move a model with hooks
        if hasattr(own.get(name), "__wrapped__"):
            del own[name]


def _load(loads: Mapping[int, Callable[[], Tensor]], layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
    for owned in modules_of_layer(layers, name):
        for _, tensor in owned.tensors():
            if id(tensor) in fresh and id(tensor) in loads:
                tensor.copy_(loads[id(tensor)]())

"""Turn off the caches that Hugging Face models create in addition to their output. A pipe does not support them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn

from ..module._inputs import Inputs


def _caches(value: Any) -> bool:
    return getattr(value, "use_cache", False) is True


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    found: list[Any] = [vars(module).get("config") for module in model.modules()]
    configs = list(filter(_caches, found))
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        try:
            _use(configs)
        except BaseException:
            try:
                _use(configs)  # again after an interrupt
            finally:
                _use(configs)  # and after another one
            raise


def _use(configs: Sequence[Any]) -> None:
    for config in configs:
        config.use_cache = True


def expect_same_without_cache(model: nn.Module, inputs: Inputs) -> None:
    """Raise ValueError if ``model`` would compute something different with its cache, which is off in a pipe."""
    given, config = inputs.to_dict(model.forward), vars(model).get("config")
    if given.get("use_cache") is None and (name := _shares_by_cache(model)):
        raise ValueError(
            f"layer {name!r} takes keys and values of an earlier layer from the cache, which a pipe turns off, so that "
            "it would compute its own; pass use_cache=True, or update transformers, whose later versions pass them "
            "from layer to layer"
        )
    # Without a cache, models start a new document when the positions in a row begin again. With one, they do not.
    positions = given.get("position_ids")
    if not _caches(config) or not isinstance(positions, Tensor) or positions.dim() != 2:
        return
    if given.get("attention_mask") is None and given.get("use_cache") is None and bool((positions.diff() != 1).any()):
        raise ValueError(
            "position_ids begin again in a row: by default, with a cache, the model attends from one document to "
            "those before in its row, and a pipe has no cache; pass use_cache=False, with which both keep documents "
            "apart, or an attention_mask of ones, with which neither does"
        )


def _shares_by_cache(model: nn.Module) -> str | None:
    """Return the name of a layer that takes keys and values of an earlier layer from the cache, or None."""
    found = [getattr(module, "config", None) for module in (model, *model.children())]
    configs = [*found, *(getattr(config, "text_config", None) for config in found)]
    if not any(getattr(config, "num_kv_shared_layers", 0) for config in configs):
        return None
    layers = {name: each for name, each in model.named_modules() if getattr(each, "is_kv_shared_layer", False)}
    for name, layer in layers.items():
        if _caches(getattr(layer, "config", None)) and "shared_kv_states" not in signature(layer.forward).parameters:
            return str(name)
    return None

"""What models of Hugging Face make besides their output, and layers in a pipe do not: caches, and what hooks find."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ._inputs import Inputs


def _caches(value: Any) -> bool:
    return getattr(value, "use_cache", False) is True


def uncached(value: Any) -> Any:
    """A copy of a configuration by which models make no cache; any other attribute of a module as it is."""
    if not _caches(value):
        return value
    config = copy.copy(value)
    config.use_cache = False
    return config


HOOKED = "_output_capturing_hooks_installed"
"""By this attribute models note that their modules have the hooks that collect hidden states: it stays as these do."""

_INSIDE = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments, and flags of a configuration, by which a model collects values while its blocks run."""


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    found: list[Any] = [vars(module).get("config") for module in model.modules()]
    configs = list(filter(_caches, found))
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


def expect_followed(model: nn.Module, inputs: Inputs, parts: Iterable[nn.Module] = ()) -> None:
    """Raise ValueError if layers of ``model`` would compute something else for ``inputs`` than the model by itself."""
    given, config = inputs.named(model.forward), vars(model).get("config")
    configs = [config, *(vars(part).get("config") for part in parts)]
    for name in _INSIDE:
        asked = given.get(name)
        if any(getattr(each, name, False) for each in configs) if asked is None else asked:
            raise ValueError(
                f"{name} asks for values from inside of blocks, which a pipe has in layers of their own; pass "
                f"{name}=False, or set it in model.config, and in those of its parts, and get these values of the "
                "plain model, or by hooks on its blocks"
            )
    # Without a cache, models take what follows positions that begin again for another document, and with one not.
    positions = given.get("position_ids")
    if not _caches(config) or not isinstance(positions, Tensor) or positions.dim() != 2:
        return
    if given.get("attention_mask") is None and given.get("use_cache") is None and bool((positions.diff() != 1).any()):
        raise ValueError(
            "position_ids begin again in a row: by default, with a cache, the model attends from one document to "
            "those before in its row, and a pipe has no cache; pass use_cache=False, with which both keep documents "
            "apart, or an attention_mask of ones, with which neither does"
        )

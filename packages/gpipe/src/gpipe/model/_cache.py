"""Turn off the caches that Hugging Face models create in addition to their output. A pipe does not support them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        for config in configs:
            config.use_cache = True


def expect_documents_apart(model: nn.Module, inputs: Inputs) -> None:
    """Raise ValueError if ``model`` would compute something different with its cache, which is off in a pipe."""
    given, config = inputs.named(model.forward), vars(model).get("config")
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

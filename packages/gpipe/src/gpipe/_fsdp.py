"""Find modules sharded by ``fully_shard`` (FSDP2), whose parameters are replaced between calls."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def fsdp_modules(module: nn.Module) -> list[Any]:
    """Return the modules in ``module`` that ``fully_shard`` was applied to, without importing FSDP."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not _is_used(kind):
        return []
    return [each for each in module.modules() if isinstance(each, kind)]


def _is_used(kind: type) -> bool:
    """Return whether FSDP has sharded a module in this process: it derives a class from each class that it shards."""
    below: list[type] = kind.__subclasses__()
    return any(issubclass(each, nn.Module) or _is_used(each) for each in below)

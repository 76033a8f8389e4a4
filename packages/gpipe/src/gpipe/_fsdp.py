"""Modules that ``torch.distributed.fsdp.fully_shard`` has sharded: their parameters are replaced from call to call."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def fsdp_modules(module: nn.Module) -> list[Any]:
    """The modules in ``module`` that ``fully_shard`` was called for; FSDP is not imported if nothing is sharded."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not _is_used(kind):
        return []
    return [each for each in module.modules() if isinstance(each, kind)]


def _is_used(kind: type) -> bool:
    """Whether ``kind`` was sharded in this process: FSDP makes a new class for each class of sharded modules."""
    below: list[type] = kind.__subclasses__()
    return any(issubclass(each, nn.Module) or _is_used(each) for each in below)

"""Modules that ``torch.distributed.fsdp.fully_shard`` has sharded: their parameters are others from call to call."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def fsdp_modules(module: nn.Module) -> list[Any]:
    """Those of ``module`` and below that ``fully_shard`` was called for; without importing it if nobody has."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [each for each in module.modules() if isinstance(each, kind)]

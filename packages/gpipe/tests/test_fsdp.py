"""Which modules are sharded."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from gpipe._fsdp import fsdp_modules

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


def test_only_those_that_were_asked_for(worlds) -> None:
    assert fsdp_modules(nn.Sequential(nn.Linear(2, 2))) == []
    assert worlds(2).run(_sharded) == [["1", "2"]] * 2


def _sharded() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    fully_shard(model[1])
    fully_shard(model[2])
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in fsdp_modules(model)]

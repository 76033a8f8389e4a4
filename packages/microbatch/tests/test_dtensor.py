"""A subclass that does know how to be cut: a tensor spread over a mesh, here of one process."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from microbatch import Batch, gather, scatter, scatter_views

dist = pytest.importorskip("torch.distributed")
dtensor = pytest.importorskip("torch.distributed.tensor")

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def round_trip_with_gradients(mesh: Any) -> None:
    x = dtensor.distribute_tensor(torch.arange(6.0).view(3, 2).requires_grad_(), mesh, [dtensor.Replicate()])
    batches = scatter(x, 2)
    assert [tuple(batch.tensor.shape) for batch in batches] == [(2, 2), (1, 2)]
    result = gather([Batch(batch.tensor * 2) for batch in batches])
    assert type(result) is type(x)
    assert result.full_tensor().equal(2 * x.full_tensor())
    result.sum().backward()
    assert x.grad.full_tensor().eq(2).all()


def views(mesh: Any) -> None:
    x = dtensor.distribute_tensor(torch.arange(4.0), mesh, [dtensor.Replicate()])
    batches, versions = scatter_views(x, 2)
    versions.sync()
    assert gather(batches).full_tensor().equal(x.full_tensor())


def test_in_a_process_of_its_own() -> None:
    """What DTensor keeps for a thread outlives the group, and a fork from another thread would wait for it for ever."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=300)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = dtensor.init_device_mesh("cpu", (1,))
    round_trip_with_gradients(one)
    views(one)
    dist.destroy_process_group()

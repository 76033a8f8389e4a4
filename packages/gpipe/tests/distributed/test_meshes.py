"""Ranks on a mesh of processes: stages in one dimension, layers that are parallel themselves in the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import Rank

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
]


class Block(nn.Module):
    """A layer that ``parallelize_module`` cuts; its output is that of a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("planted")
        found: Tensor = self.down(self.up(x).relu())
        return found


def _made() -> tuple[nn.Sequential, Rank]:
    """The plain model, and this process's part of it on a mesh of 2 × 2."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = nn.Sequential(*[Block() for _ in range(4)])
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank = Rank(copy.deepcopy(plain), [2, 2], chunks=2, group=mesh["pp"], replicas=mesh["tp"])
    for layer in rank.partitions[0]:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return plain, rank


def test_stages_of_tensor_parallel_layers_are_the_plain_model(worlds: Any) -> None:
    """Gradients and their norm; with ``replicas=`` the peers of a stage also take the same schedule."""
    worlds(4).run(_expect_plain)


def _expect_plain() -> None:
    plain, rank = _made()
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for schedule in ("1f1b", "zero_bubble", "auto"):
        plain.zero_grad()
        rank.zero_grad()
        expected = nn.functional.mse_loss(plain(x), y)
        expected.backward()
        found = rank.step(x, y, loss_fn=nn.functional.mse_loss, schedule=schedule)
        torch.testing.assert_close(found, expected.detach())
        whole = dict(plain.named_parameters())
        for name, parameter in rank.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), whole[name].grad)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(rank.clip_grad_norm_(0.1), norm)
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), whole[name].grad)


def test_a_failure_reaches_the_peer_that_waits_in_a_parallel_layer(worlds: Any) -> None:
    found = worlds(4).run(_fail)
    assert found[2] == "ArithmeticError: planted"
    assert all("ArithmeticError: planted" in text for text in found)
    assert all(text.startswith("RemoteError") for k, text in enumerate(found) if k != 2)


def _fail() -> str:
    _, rank = _made()
    rank.partitions[0][1].fails = dist.get_rank() == 2
    with pytest.raises((ArithmeticError, RuntimeError)) as caught:
        rank.step(torch.randn(8, 8), loss_fn=Tensor.mean)
    return f"{type(caught.value).__name__}: {caught.value}"

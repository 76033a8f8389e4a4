"""A layer that fails on demand, and helpers for tests with several processes."""

import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe._current import current


class Planted(nn.Module):
    """The identity. In one phase of one micro-batch it raises an error, or sends a signal to its process.

    Attributes:
        when: the phase (``"forward"``, ``"recompute"`` or ``"backward"``) and the micro-batch; None means never.
        how: the class of the error, or the signal.
    """

    when: tuple[str, int] | None = None
    how: type[BaseException] | signal.Signals = ArithmeticError

    def forward(self, x: Tensor) -> Tensor:
        if self.when == ("recompute" if gpipe.is_recomputing() else "forward", current.work.microbatch):
            self.act()
        if self.when == ("backward", current.work.microbatch) and x.requires_grad:
            x.register_hook(lambda _: self.act())
        return x * 1.0

    def act(self) -> None:
        if isinstance(self.how, signal.Signals):
            os.kill(os.getpid(), self.how)
        else:
            raise self.how("planted")


def planted_in(rank: nn.Module) -> Planted:
    """Return the first planted layer of a rank."""
    return next(layer for layer in rank.modules() if isinstance(layer, Planted))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())])


def batch(rows: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, equal in every call."""
    options = {"generator": torch.Generator().manual_seed(0), "dtype": dtype}
    return torch.randn(rows, 6, **options), torch.randn(rows, 6, **options)


def expect_gradients(rank: nn.Module, plain: nn.Module) -> None:
    """Expect that a rank's gradients, which may be sharded or sparse, match the plain model's gradients."""
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in rank.named_parameters():
        found, expected = parameter.grad, wanted[name].grad
        if expected is None or found is None:
            assert found is expected, name
            continue
        found = found.full_tensor() if hasattr(found, "full_tensor") else found.to_dense()
        torch.testing.assert_close(found, expected.to_dense())


def mesh_of_four() -> Any:
    """Return a mesh of two replicas with two stages each."""
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))


def shard(rank: nn.Module, mesh: Any, *, nested: bool = False, **options: Any) -> None:
    """Shard a rank's stages over the replicas, and their layers if ``nested``: these are gathered per micro-batch."""
    from torch.distributed.fsdp import fully_shard

    for partition in rank.partitions:
        for layer in partition if nested else ():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["replicas"])
        fully_shard(partition, mesh=mesh["replicas"], **options)


def own_half(mesh: Any, *given: Tensor) -> list[Tensor]:
    """Return the rows of this process's replica, which is one of two."""
    return [each.chunk(2)[mesh["replicas"].get_local_rank()] for each in given]


def long_but(cases: Iterable[tuple[Any, ...]], *short: tuple[Any, ...]) -> list[Any]:
    """Return the parameters of a test, with all but the ``short`` ones marked as long."""
    return [pytest.param(*case, marks=[] if case in short else pytest.mark.long) for case in cases]

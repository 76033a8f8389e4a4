"""Wrappers that treat ranks of a pipe as copies of one model raise, and change no weight."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe.distributed import Rank

from ..layers import Layer
from .planted import expect_gradients, network


def _model() -> nn.Module:
    def forward(s: Layer, x: Tensor) -> Tensor:
        for block in s.blocks:
            x = block(x)
        return x

    torch.manual_seed(0)
    return Layer(forward, blocks=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)))


def test_wrapping_a_rank_raises_and_changes_nothing(worlds: Any) -> None:
    worlds(2).run(_expect_refused)


def _expect_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    def wrap_around(rank: nn.Module) -> nn.Module:
        return _in_fsdp(nn.ModuleDict({"pipe": rank}), use_orig_params=True)

    wraps = [nn.parallel.DistributedDataParallel, _prepared_by_accelerate]
    wraps += [_in_fsdp, wrap_around, fully_shard]
    x, y = torch.ones(4, 6), torch.zeros(4, 6)
    for make in (network, _model):
        plain = make()
        nn.functional.mse_loss(plain(x), y).backward()
        for wrap in wraps:
            rank = Rank(copy.deepcopy(plain), chunks=2, **({"balance": [4, 4]} if make is network else {}))
            with pytest.raises(TypeError, match=r"(?s)(rank\)|prepare\(rank\)).*is not supported.*replicas=") as caught:
                wrap(rank)
            assert ("new Rank" in str(caught.value)) == (wrap is fully_shard)
            if wrap is not fully_shard:
                rank.zero_grad()
                rank.step(x, y, loss_fn=nn.functional.mse_loss, reduction="mean")
                expect_gradients(rank, plain)
                for name, parameter in rank.named_parameters():
                    assert torch.equal(parameter, plain.get_parameter(name))
            rank.close()


def _in_fsdp(module: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def _prepared_by_accelerate(rank: nn.Module) -> nn.Module:
    """Wrap ``rank`` as ``Accelerator.prepare_model`` does in several processes."""
    return nn.parallel.DistributedDataParallel(rank, broadcast_buffers=False, find_unused_parameters=True)


def test_wrapping_a_module_around_a_rank_raises(worlds: Any) -> None:
    worlds(2).run(_expect_refused_around)


def _expect_refused_around() -> None:
    rank = Rank(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), [2, 2], chunks=2)
    around = nn.ModuleDict({"pipe": rank, "other": nn.Linear(2, 2)})
    wrapped = nn.parallel.DistributedDataParallel(around)
    with pytest.raises((TypeError, RuntimeError), match="DistributedDataParallel"):
        rank.step(torch.ones(4, 6), loss_fn=Tensor.mean, reduction="mean")
    assert isinstance(wrapped.module["pipe"], Rank)


def test_rank_of_an_fsdp_model_raises(worlds: Any) -> None:
    worlds(2).run(_expect_fsdp_refused)


def _expect_fsdp_refused() -> None:
    part = network()
    part[3] = _in_fsdp(nn.Sequential(nn.Linear(6, 6)))
    whole = _in_fsdp(_model())
    for module, name, options in ((part, "'3' is", {"balance": [4, 4]}), (whole, "it is", {})):
        with pytest.raises(TypeError, match=rf"module: {name} wrapped in Fully.*fully_shard\(partition") as caught:
            Rank(module, chunks=2, **options)
        assert "rank.partitions" in str(caught.value)
    rank = Rank(network(), [4, 4], chunks=2)
    assert not hasattr(rank, "_is_fsdp_managed_module")
    rank.step(torch.ones(4, 6), loss_fn=Tensor.mean, reduction="mean")

"""Shared tensors must stay equal on all ranks, and a rank must not use the parameters of another rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

import gpipe
from gpipe.distributed import Rank
from gpipe.distributed._tied import TiedState, TiedTensor

from ..layers import Tied
from .planted import batch, network


@pytest.mark.parametrize("change", ["values", "frozen", "pruned", "batch norm"])
def test_diverged_copies_raise_on_all_ranks(worlds: Any, change: str) -> None:
    for _, text in worlds(3).answers(_step_after, change):
        assert "ValueError: " in text
        assert "of rank 2 are one tensor of the model, but now differ" in text


def _step_after(change: str) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    ends: tuple[nn.Module, nn.Module] = (shared, Tied(shared))
    if change == "batch norm":
        ends = (nn.BatchNorm1d(6),) * 2
    # One of them is in a container, because a layer may occur only once in a model.
    rank = Rank(nn.Sequential(ends[0], nn.Linear(6, 6), nn.Sequential(ends[1])), [1, 1, 1], chunks=2)
    if change == "values" and dist.get_rank() == 2:
        next(rank.parameters()).data.mul_(0.99)  # like weight decay that an optimizer applies by name
    if change == "frozen" and dist.get_rank() == 0:
        rank.requires_grad_(False)
    if change == "pruned" and dist.get_rank() != 1:
        prune.identity(next(m for m in rank.modules() if "weight" in m._parameters), "weight")
    rank.step(*batch(), loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_copies_may_differ_by_rounding_errors(dtype: torch.dtype) -> None:
    """A decay of 3e-4, as after 300 steps, is detected. In half precision 1% is detected; less may be rounded away."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    is_half = dtype.itemsize == 2

    def state(factor: float) -> TiedState:
        module = nn.Module()
        module.weight = nn.Parameter((weight * factor).to(dtype))
        return TiedTensor(0, [0, 1], module, "weight").state()

    assert state(1.0).is_like(state(1 - (2e-4 if is_half else 2e-5)))
    assert not state(1.0).is_like(state(1 - (1e-2 if is_half else 3e-4)))


SHAPES = ((), (0,), (7,), (3, 4), (2, 3, 5), (20_000,), (500, 64))


@given(
    st.sampled_from(SHAPES), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), st.data()
)
def test_sum_and_norm_are_nearly_exact(shape: tuple[int, ...], dtype: torch.dtype, data: Any) -> None:
    """Values with a large mean have a sum that is much larger than their norm."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    mean, scale = data.draw(st.sampled_from([0.0, 1.0, 30.0])), data.draw(st.sampled_from([1e-3, 1.0, 30.0]))
    module = nn.Module()
    module.weight = nn.Parameter((mean + scale * torch.randn(shape, generator=generator)).to(dtype))
    found = TiedTensor(0, [0, 1], module, "weight").state()
    values = module.weight.detach().double()
    own = found._replace(figures=(float(values.sum()), float(values.norm())), rounding=found.rounding / 10)
    assert own.is_like(found._replace(rounding=0.0))


@pytest.mark.parametrize("who", ["loss", "layer"])
@pytest.mark.parametrize("counted", [False, True])
def test_using_a_parameter_of_another_rank_raises(worlds: Any, who: str, counted: bool) -> None:
    (_, told), (_, text) = worlds(2).answers(_use, who, counted)
    assert "belongs to stage 0 on another rank" in text
    assert "rank 1 failed: RuntimeError: " in told


def _use(who: str, counted: bool) -> None:
    model = network()
    if who == "layer":
        model[7].register_forward_hook(lambda module, given, output: output @ model[0].weight)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        penalty = sum(p.square().sum() for p in model.parameters()) if who == "loss" else 0.0
        loss = nn.functional.mse_loss(output, target, reduction="sum") + penalty
        return gpipe.LossSum(loss, len(output)) if counted else loss

    rank = Rank(model, [4, 4], chunks=2)
    model(batch()[0]).sum().backward()  # outside a run, the model can still be called
    rank.step(*batch(), loss_fn=loss_fn)


def test_initial_weights_differ_but_generators_stay_equal(worlds: Any) -> None:
    found = worlds(2).run(_drawn)
    assert len({tuple(weight) for weights, _ in found for weight in weights}) == 4
    assert found[0][1] == found[1][1]


def _drawn() -> tuple[list[list[float]], int]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    rank = Rank(model, [2, 2], init="reset")
    return [layer.weight.flatten().tolist() for layer in rank.partitions[0]], int(torch.randint(2**31, ()))


def test_shared_weight_is_loaded_on_each_rank(worlds: Any) -> None:
    worlds(2).run(_expect_loaded)


def _expect_loaded() -> None:
    first, weight = nn.Linear(6, 6, device="meta"), torch.ones(6, 6)
    model = nn.Sequential(first, nn.Linear(6, 6, bias=False, device="meta"))
    model[1].weight = first.weight
    rank = Rank(model, [1, 1], init={"0.weight": weight, "0.bias": torch.zeros(6)})
    assert all(torch.equal(each, weight) for each in rank.parameters() if each.dim() == 2)


def test_a_rank_cannot_be_copied(worlds: Any) -> None:
    for _, text in worlds(2).answers(_copy):
        assert "TypeError: a Rank has connections to other processes, so it cannot be copied" in text


def _copy() -> None:
    copy.deepcopy(Rank(network(), [4, 4]))

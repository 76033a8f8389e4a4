"""What ranks share must stay alike, and what belongs to another rank must not be trained here."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from gpipe.distributed import Rank

from ..layers import Tied
from .planted import batch, network

CHANGES = ["values", "frozen", "pruned", "batch norm", "embedding"]


@pytest.mark.parametrize("change", CHANGES)
def test_copies_that_are_not_treated_alike_are_refused_on_all_ranks(worlds: Any, change: str) -> None:
    for kind, text in worlds(3).run(_step_after, change):
        assert kind == "ValueError"
        assert "of rank 0" in text
        assert "of rank 2 are one tensor of the model, but differ by now" in text


def _step_after(change: str) -> tuple[str, str]:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    ends: tuple[nn.Module, nn.Module] = (shared, Tied(shared))
    if change == "batch norm":
        ends = (nn.BatchNorm1d(6),) * 2
    if change == "embedding":
        table = nn.Embedding(6, 6, max_norm=0.1)
        ends = (Looks(table, 0), Looks(table, 2))
    # A container around one of them: a layer occurs once in a model.
    rank = Rank(nn.Sequential(ends[0], nn.Linear(6, 6), nn.Sequential(ends[1])), [1, 1, 1], chunks=2)
    own = next(rank.parameters())
    if change == "values" and dist.get_rank() == 2:
        own.data.mul_(0.99)  # decay that an optimizer applies by name
    if change == "frozen" and dist.get_rank() == 0:
        rank.requires_grad_(False)
    if change == "pruned" and dist.get_rank() != 1:
        prune.identity(next(m for m in rank.modules() if "weight" in m._parameters), "weight")
    return _error_of(lambda: rank.step(*batch(), loss_fn=nn.functional.mse_loss))


class Looks(nn.Module):
    def __init__(self, table: nn.Embedding, first: int) -> None:
        super().__init__()
        self.table, self.first = table, first

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(self.first + (x[:, 0] > 0).long())


def _error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("who", ["loss", "layer"])
@pytest.mark.parametrize("counted", [False, True])
def test_who_uses_a_parameter_of_another_rank_is_refused(worlds: Any, who: str, counted: bool) -> None:
    (_, told), (kind, text) = worlds(2).run(_use, who, counted)
    assert kind == "RuntimeError"
    assert "belongs to stage 0, which is on another rank" in text
    assert "rank 1 failed: RuntimeError: " in told


def _use(who: str, counted: bool) -> tuple[str, str]:
    model = network()
    if who == "layer":
        model[7].register_forward_hook(lambda module, given, output: output @ model[0].weight)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        penalty = sum(p.square().sum() for p in model.parameters()) if who == "loss" else 0.0
        loss = nn.functional.mse_loss(output, target, reduction="sum") + penalty
        return (loss, len(output)) if counted else loss

    rank = Rank(model, [4, 4], chunks=2)
    found = _error_of(lambda: rank.step(*batch(), loss_fn=loss_fn))
    model(batch()[0]).sum().backward()  # outside of runs the model is a model
    return found


def test_each_rank_draws_its_own_values_and_all_generators_stay_alike(worlds: Any) -> None:
    found = worlds(2).run(_drawn)
    assert len({tuple(weight) for weights, _ in found for weight in weights}) == 4
    assert found[0][1] == found[1][1]


def _drawn() -> tuple[list[list[float]], int]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    rank = Rank(model, [2, 2], init="reset")
    return [layer.weight.flatten().tolist() for layer in rank.partitions[0]], int(torch.randint(2**31, ()))


def test_a_shared_weight_that_was_saved_under_one_name_is_loaded_on_each_rank(worlds: Any) -> None:
    worlds(2).run(_expect_loaded)


def _expect_loaded() -> None:
    first = nn.Linear(6, 6, device="meta")
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(first, nn.Linear(6, 6, bias=False, device="meta"))
    model[1].weight = first.weight
    rank = Rank(model, [1, 1], init={"0.weight": weight, "0.bias": torch.zeros(6)})
    assert all(torch.equal(each, weight) for each in rank.parameters() if each.dim() == 2)


def test_a_rank_cannot_be_copied(worlds: Any) -> None:
    for kind, text in worlds(2).run(_copied):
        assert kind == "TypeError"
        assert "cannot be copied or pickled" in text


def _copied() -> tuple[str, str]:
    rank = Rank(network(), [4, 4])
    return _error_of(lambda: copy.deepcopy(rank))


def test_a_rank_that_clips_while_another_begins_a_step_is_told(worlds: Any) -> None:
    (kind, _), (other, text) = worlds(2).run(_out_of_order)
    assert kind == "LostRankError"
    assert other == "RuntimeError"
    assert "in the same order" in text


def _out_of_order() -> tuple[str, str]:
    rank = Rank(network(), [4, 4], chunks=2)
    if dist.get_rank():
        return _error_of(lambda: rank.clip_grad_norm_(1.0))
    return _error_of(lambda: rank.step(*batch(), loss_fn=nn.functional.mse_loss))

"""Losses that a model computes from its last hidden states and the weight of its head, without all logits at once."""

import copy
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe
from gpipe.distributed import Rank

from ..distributed.planted import expect_gradients
from ..layers import gradients
from .losses import CLASSES, IGNORED

WIDTH, PARTS = 4, 3
Total = Callable[[nn.Linear, Tensor, Tensor, Any], Tensor]
"""Returns the sum of the losses, from the head, the hidden states, the labels, and the number that divides it."""


class Model(nn.Module):
    """Its head may have the weight of the first layer. Its loss follows the convention of ``num_items_in_batch``."""

    def __init__(self, total: Total, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.total = total
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        hidden, labels = self.norm(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.total(self.head, hidden, labels, count)}


def summed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


class Fused(Function):
    """Computes gradients in its forward, part by part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        of_hidden, of_weight, total = torch.empty_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for part, rows, target in zip(hidden.chunk(PARTS), of_hidden.chunk(PARTS), labels.chunk(PARTS), strict=True):
            losses = (part @ weight.t()).log_softmax(-1)
            counted = target != IGNORED
            words = target.where(counted, 0)[:, None]
            total -= losses.gather(1, words)[counted].sum()
            of_logits = losses.exp().scatter_add_(1, words, -torch.ones_like(losses[:, :1])) * counted[:, None]
            rows.copy_(of_logits @ weight)
            of_weight.addmm_(of_logits.t(), part)
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None


class ByTransform(Function):
    """Computes the gradients of each part by ``torch.func``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        compute = torch.func.grad_and_value(summed, argnums=(0, 1))
        found = [compute(part, weight, own) for part, own in zip(hidden.chunk(PARTS), labels.chunk(PARTS), strict=True)]
        of_weight = torch.stack([of_weight for (_, of_weight), _ in found]).sum(0)
        ctx.save_for_backward(torch.cat([of_hidden for (of_hidden, _), _ in found]), of_weight)
        return torch.stack([total for _, total in found]).sum()

    backward = Fused.backward


class ByAutograd(Function):
    """Computes the gradients of each part by ``torch.autograd.grad``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        own = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            total = summed(*own, labels)
        ctx.save_for_backward(*torch.autograd.grad(total, own))
        return total.detach()

    backward = Fused.backward


def fused(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    return Fused.apply(hidden, head.weight, labels) / count


def by_transform(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    return ByTransform.apply(hidden, head.weight, labels) / count


def by_autograd(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    return ByAutograd.apply(hidden, head.weight, labels) / count


def in_parts(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    parts = zip(hidden.chunk(PARTS), labels.chunk(PARTS), strict=True)
    return torch.stack([summed(part, head.weight, own) for part, own in parts]).sum() / count


def in_calls(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    parts = zip(hidden.chunk(PARTS), labels.chunk(PARTS), strict=True)
    return torch.stack([F.cross_entropy(head(part), own, reduction="sum") for part, own in parts]).sum() / count


def recomputed(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    parts = zip(hidden.chunk(PARTS), labels.chunk(PARTS), strict=True)
    found = [checkpoint(summed, part, head.weight, own, use_reentrant=False) for part, own in parts]
    return torch.stack(found).sum() / count


def cut_cross_entropy(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    counted = labels != IGNORED
    own = (hidden * head.weight[labels.where(counted, 0)]).sum(1)
    return (((hidden @ head.weight.t()).logsumexp(1) - own) * counted).sum() / count


def linear_cross_entropy(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    return F.linear_cross_entropy(hidden, head.weight, labels, reduction="sum") / count


TOTALS = [fused, by_transform, by_autograd, in_parts, in_calls, recomputed, cut_cross_entropy]
TOTALS += [linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else []


def mean_by_labels(head: nn.Linear, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    """Compute a loss without the number of items."""
    return Fused.apply(hidden, head.weight, labels) / (labels != IGNORED).sum()


def batch(items: int | None) -> dict[str, Any]:
    tokens = torch.randint(CLASSES, (6, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, :5] = labels[4, 2:] = IGNORED
    return {"tokens": tokens, "labels": labels, **({} if items is None else {"num_items_in_batch": items})}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("items", "blocks", "mode"), [(None, None, "never"), (13, "layers", "always")])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("total", [*TOTALS, mean_by_labels])
def test_it_is_the_loss_of_the_plain_model(
    total: Total, tied: bool, items: int | None, blocks: str | None, mode: str
) -> None:
    """Once per micro-batch and by a worker of the last stage, from the second step on under 1F1B if it adds up."""
    torch.manual_seed(0)
    plain, threads = Model(total, tied=tied), Counter[str]()

    def counted(*args: Any) -> Tensor:
        threads[threading.current_thread().name] += 1
        return total(*args)

    expected = plain(**batch(items))["loss"]
    expected.backward()
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * 3, chunks=3, blocks=blocks, checkpoint=mode)
    with closing(pipe):
        for _ in range(3):
            pipe.zero_grad()
            torch.testing.assert_close(pipe.step(**batch(items)), expected.detach())
            torch.testing.assert_close(gradients(pipe), gradients(plain))
        assert pipe.last_schedule is not None
        assert pipe.last_schedule.name == ("1f1b" if total in TOTALS else "fill_drain")
        torch.testing.assert_close(pipe.evaluate(**batch(items)), expected.detach())
        pipe.zero_grad()
        pipe(**batch(items))["loss"].backward()
        torch.testing.assert_close(gradients(pipe), gradients(plain))
        if total in TOTALS:
            pipe[:].total = counted
            for _ in range(2):  # it is tried out again, as the model has another attribute
                threads.clear()
                pipe.step(**batch(items))
            assert sum(threads.values()) == 3
            assert all(name.startswith("gpipe forward") for name in threads)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("total", [*TOTALS, mean_by_labels])
def test_fused_loss_on_ranks_matches_plain_model(worlds: Any, total: Total, tied: bool) -> None:
    """Only the rank of the last stage has the hidden states."""
    worlds(2).run(_expect_on_ranks, total, tied)


def _expect_on_ranks(total: Total, tied: bool) -> None:
    torch.manual_seed(0)
    plain = Model(total, tied=tied)
    expected = plain(**batch(None))["loss"]
    expected.backward()
    with closing(Rank(copy.deepcopy(plain), chunks=3)) as rank:
        for _ in range(2):
            rank.zero_grad()
            torch.testing.assert_close(rank.step(**batch(None)), expected.detach())
            expect_gradients(rank, plain)
        torch.testing.assert_close(rank.evaluate(**batch(None)), expected.detach())

"""Over several ranks, any loss matches the plain model, and only the last rank needs the target."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import LossSum
from gpipe.distributed import Rank, RemoteError
from gpipe.schedule import Schedule

from ..model.test_loss_of_model import Model, contrast, scaled_by_items, two_ends
from ..model.test_loss_of_model import batch as labelled
from .planted import batch, expect_gradients

CHUNKS = 3


class Counts(nn.Module):
    """The identity. All instances together count their forwards that are not recomputations."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.seen += not gpipe.is_recomputing()
        return x * 1.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), Counts(), nn.Tanh())])


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    scores = F.normalize(output, dim=1) @ F.normalize(target, dim=1).T
    return F.cross_entropy(5 * scores, torch.arange(len(scores)))


def standardized(output: Tensor, target: Tensor) -> Tensor:
    return ((output - output.mean(0)) / (output.var(0) + 1).sqrt() - target).square().mean()


def with_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    hits = (output > target).sum()
    return contrastive(output, target), {"hits": hits, "rows": len(output), "scores": output.sum(1), "of none": hits}


def summed(output: Tensor, target: Tensor):
    kept = (target > 0).sum(1)
    return LossSum(((output - target).square().mean(1) * kept).sum(), kept.sum())


def summed_with_metrics(output: Tensor, target: Tensor) -> Any:
    return summed(output, target), {"mean": output.mean(), "scores": output.sum(1)}


WHOLE: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (contrastive, standardized, with_metrics, summed, summed_with_metrics)
}
WRITTEN = {
    2: "F0 F1 F2 B1 B2 B0 \n F0 F1 F2 C B1 B2 B0",
    3: "F0 F1 F2 I2 B1 B0 W2 \n F0 F1 F2 B2 B1 B0 \n F1 F0 F2 C B2 B1 B0",
}
PLACES: dict[int, list[list[int]]] = {2: [[0, 1], [1, 0], [0, 1, 0, 1], [0, 1, 1, 0]], 3: [[0, 1, 2], [2, 0, 1]]}


@given(
    st.sampled_from([*WHOLE]),
    st.sampled_from([(size, ranks) for size, every in PLACES.items() for ranks in every]),
    st.sampled_from([None, "auto", "fill_drain", "written"]),
    st.sampled_from(["never", "except_last", "always"]),
    st.booleans(),
)
@settings(max_examples=max(12, settings().max_examples // 5))
def test_full_batch_loss_matches_the_plain_model(
    worlds: Any, loss: str, where: tuple[int, list[int]], schedule: str | None, checkpoint: str, outputs: bool
) -> None:
    """All layers run once per micro-batch, and all ranks have the loss and its metrics."""
    size, ranks = where
    if schedule == "written":
        schedule = WRITTEN[size] if ranks in ([0, 1], [0, 1, 2]) else None
    found = worlds(size).run(_expect_plain, loss, ranks, schedule, checkpoint, outputs)
    assert all(each == found[0] for each in found)


def _expect_plain(loss: str, ranks: list[int], schedule: Any, checkpoint: str, outputs: bool) -> list[Any]:
    plain, loss_fn = network(), WHOLE[loss]
    balance = [12 // len(ranks)] * len(ranks)
    rank = Rank(copy.deepcopy(plain), balance, ranks=ranks, chunks=CHUNKS, checkpoint=checkpoint)
    x, y = batch(11)
    chosen = Schedule.parse(schedule) if schedule is not None and "F0" in schedule else schedule
    told = []
    for again in (False, True):
        plain.zero_grad()
        rank.zero_grad()
        expected, metrics = _of_plain(loss_fn(plain(x), y))
        expected.backward()
        Counts.seen = 0
        found = rank.step(x, y, loss_fn=loss_fn, schedule=chosen, return_outputs=outputs)
        assert Counts.seen == CHUNKS * sum(isinstance(each, Counts) for each in rank.modules())
        name = rank.last_schedule.name
        # From the second step on, a LossSum may use 1F1B, unless that would change metrics.
        assert name == (
            "own" if chosen is not schedule else "1f1b" if again and _is_free(loss, schedule) else "fill_drain"
        )
        found = found if isinstance(found, tuple) else (found,)
        torch.testing.assert_close(found[0], expected.detach())
        expect_gradients(rank, plain)
        if metrics is not None:
            for key, value in metrics.items():
                torch.testing.assert_close(torch.as_tensor(found[1][key]), torch.as_tensor(value), check_dtype=False)
        if outputs:
            assert (found[-1] is None) == (dist.get_rank() != ranks[-1])
            assert found[-1] is None or torch.allclose(found[-1], plain(x))
        torch.testing.assert_close(rank.evaluate(x, y, loss_fn=loss_fn, return_outputs=True)[0], found[0])
        told.append([found[0].item(), *({} if metrics is None else found[1])])
    return told


def _is_free(loss: str, schedule: str | None) -> bool:
    return loss == "summed" and schedule in (None, "auto")


def _of_plain(value: Any) -> tuple[Tensor, dict[str, Any] | None]:
    metrics = None
    if isinstance(value, tuple) and not isinstance(value, LossSum):
        value, metrics = value
    return (value.total / value.count if isinstance(value, LossSum) else value), metrics


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "F0 B0 F1 B1 F2 B2 \n F0 B0 F1 B1 F2 B2"])
def test_schedule_that_cannot_wait_raises_on_all_ranks(worlds: Any, schedule: str) -> None:
    first, last = worlds(2).run(_expect_refused, schedule)
    assert last.startswith(
        "ValueError: loss_fn returned a scalar, but it is not known how the losses of micro-batches add"
    )
    assert first.startswith("RemoteError: rank 1 failed: ValueError: loss_fn returned a scalar")


def _expect_refused(schedule: str) -> str:
    plain = network()
    rank = Rank(copy.deepcopy(plain), [6, 6], chunks=CHUNKS)
    x, y = batch()
    chosen = Schedule.parse(schedule) if "F0" in schedule else schedule
    with pytest.raises((ValueError, RemoteError)) as refused:
        rank.step(x, y, loss_fn=contrastive, schedule=chosen)
    assert all(parameter.grad is None for parameter in rank.parameters())
    for options in ({}, {"loss_fn": F.mse_loss, "schedule": chosen}):  # then a loss that the schedule need not wait for
        _expect_step(rank, plain, (x, y), (x, y), **{"loss_fn": contrastive, **options})
    return f"{refused.type.__name__}: {refused.value}"


def _expect_step(rank: Rank, plain: nn.Module, every: Any, given: Any, **options: Any) -> None:
    """Expect that a step with this rank's arguments ``given`` matches the plain model on the arguments ``every``."""
    plain.zero_grad()
    rank.zero_grad()
    loss_fn = options["loss_fn"]
    x, y = every
    expected, _ = _of_plain((summed if loss_fn is None else loss_fn)(plain(x), y))
    expected.backward()
    torch.testing.assert_close(rank.step(*given, **options), expected.detach())
    expect_gradients(rank, plain)


def test_target_and_loss_on_last_rank_only(worlds: Any) -> None:
    """Only the last rank needs the target, or a loss that adds up. The first rank needs any other loss function too."""
    assert worlds(2).run(_expect_given_on_the_last_rank) == ["RemoteError", "ValueError"]


def _counted(output: Tensor, target: Tensor) -> LossSum:
    return summed(output, target)


def _expect_given_on_the_last_rank() -> str:
    plain = network()
    rank, is_last = Rank(copy.deepcopy(plain), [6, 6], chunks=CHUNKS), dist.get_rank() == 1
    x, y = batch(11)
    labels = torch.arange(11) % 6
    labels[:4] = -100

    def given(target: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (None, target) if is_last else (x, None)

    for schedule in (None, "zero_bubble"):
        for loss_fn, target in ((F.cross_entropy, labels), (nn.MSELoss(), y), (_counted, y), (summed, y)):
            for fn in (loss_fn, loss_fn) if loss_fn is summed else (loss_fn, loss_fn if is_last else None):
                _expect_for(rank, plain, x, target, given(target), fn, loss_fn, schedule)
    _expect_for(rank, plain, x, y, given(y), standardized, standardized, None)
    _expect_for(rank, plain, x, y, given(y), summed if is_last else None, summed, None)
    rank.zero_grad()
    with pytest.raises((ValueError, RemoteError), match=r"first stage decides.*pass the same on both") as no:
        rank.step(*given(y), loss_fn=standardized if is_last else None)
    assert all(parameter.grad is None for parameter in rank.parameters())
    with pytest.raises((ValueError, RemoteError), match="target has 1 rows"):
        rank.step(*given(y[:1]), loss_fn=F.mse_loss)
    _expect_for(rank, plain, x, y, given(y), contrastive, contrastive, None)
    return no.type.__name__


def _expect_for(
    rank: Rank, plain: nn.Module, x: Tensor, target: Tensor, given: Any, own: Any, loss_fn: Any, schedule: str | None
) -> None:
    plain.zero_grad()
    rank.zero_grad()
    expected, _ = _of_plain(loss_fn(plain(x), target))
    expected.backward()
    torch.testing.assert_close(rank.step(*given, loss_fn=own, schedule=schedule), expected.detach())
    expect_gradients(rank, plain)


@pytest.mark.parametrize("loss", [scaled_by_items, two_ends, contrast])
def test_models_own_loss_matches_the_plain_model(worlds: Any, loss: Callable[..., Tensor]) -> None:
    worlds(2).run(_expect_own, loss)


def _expect_own(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    plain, is_first = Model(loss), dist.get_rank() == 0
    rank = Rank(copy.deepcopy(plain), chunks=CHUNKS)
    inputs = labelled(7, 4, 5)
    for schedule in ("fill_drain", None) if loss is not scaled_by_items else ("fill_drain",):
        _expect_step_of(rank, plain, inputs, schedule=schedule)
        assert rank.last_schedule.name == "fill_drain"
    rank.zero_grad()
    with pytest.raises((TypeError, RemoteError), match="every rank needs the inputs"):
        rank.step(**(inputs if is_first else {}))
    if loss is scaled_by_items:  # its convention has been found by the steps above
        _expect_step_of(rank, plain, inputs, schedule="1f1b")
        return
    with pytest.raises((ValueError, RemoteError), match=r"not known how the losses of micro-batches.*omit schedule="):
        rank.step(**inputs, schedule="1f1b")
    assert all(parameter.grad is None for parameter in rank.parameters())
    _expect_step_of(rank, plain, inputs)


def _expect_step_of(rank: Rank, plain: nn.Module, inputs: Any, **options: Any) -> None:
    plain.zero_grad()
    rank.zero_grad()
    expected = plain(**inputs)["loss"]
    expected.backward()
    torch.testing.assert_close(rank.step(**inputs, **options), expected.detach())
    expect_gradients(rank, plain)
    torch.testing.assert_close(rank.evaluate(**inputs), expected.detach())


class Ends(nn.Module):
    """A last layer that returns the loss of its rows."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Any:
        return LossSum(x.square().sum(), x.numel()) if self.counts else x.square().mean()


def test_last_layer_may_return_the_loss(worlds: Any) -> None:
    worlds(2).run(_expect_ends)


def _expect_ends() -> None:
    x, _ = batch(11)
    for counts in (False, True):
        plain = network()
        rank = Rank(nn.Sequential(*network(), Ends(counts=counts)), [6, 7], chunks=CHUNKS)
        expected = plain(x).square().mean()
        expected.backward()
        found = rank.step(x, reduction=None if counts else "mean")
        torch.testing.assert_close(found, expected.detach())
        expect_gradients(rank, plain)
        assert rank.last_schedule.name == "1f1b"
        rank.zero_grad()
        if not counts:
            with pytest.raises((ValueError, RemoteError), match=r"for a sum, or return gpipe\.LossSum"):
                rank.step(x)
            assert all(parameter.grad is None for parameter in rank.parameters())


def test_full_batch_loss_is_recorded_once(worlds: Any) -> None:
    first, last = worlds(2).run(_recorded)
    assert first == last
    assert set(first) == {"C@1", *(f"{kind}{i}@{j}" for kind in "FB" for i in range(CHUNKS) for j in range(2))}


def _recorded() -> list[str]:
    rank = Rank(network(), [6, 6], chunks=CHUNKS, checkpoint="never")
    with gpipe.record() as timeline:
        rank.step(*batch(), loss_fn=contrastive)
    return sorted(map(str, timeline.events))


def test_failing_full_batch_loss_is_named_everywhere(worlds: Any) -> None:
    found = worlds(2).run(_fail)
    assert found[1] == "ArithmeticError: planted"
    assert found[0].startswith("RemoteError: rank 1 failed: ArithmeticError: planted\n")
    assert "the loss of all 3 micro-batches" in found[0]


def _fail() -> str:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("planted")

    plain = network()
    rank = Rank(copy.deepcopy(plain), [6, 6], chunks=CHUNKS)
    with pytest.raises((ArithmeticError, RemoteError)) as failed:
        rank.step(*batch(), loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in rank.parameters())
    x, y = batch(11)
    _expect_for(rank, plain, x, y, (x, y), contrastive, contrastive, None)
    return f"{failed.type.__name__}: {failed.value}"

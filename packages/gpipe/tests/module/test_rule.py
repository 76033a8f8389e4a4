"""Any loss is computed for the full mini-batch: summed over micro-batches if possible, or else once."""

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe, LossSum
from gpipe.module._rule import SeenSums
from gpipe.schedule import SCHEDULES, Schedule
from microbatch import Mean, Replicate, Sum

from ..layers import DOUBLE, MODES, assert_same, linears, piped, rows
from ..schedules import ALONE

PAD, CLASSES = -100, 3
Function = Callable[..., Any]


# Losses that people write, as compositions. Each step takes the values so far, one or more per row, and labels, with
# -100 for ignored ones.


def kept(labels: Tensor) -> Tensor:
    return labels != PAD


ON_VALUES: dict[str, Function] = {
    "square": lambda v, t: v.square(),
    "tanh": lambda v, t: v.tanh(),
    "log softmax": lambda v, t: v.log_softmax(1),
    "softmax over rows": lambda v, t: v.softmax(0),
    "centered": lambda v, t: v - v.mean(0),
    "standardized": lambda v, t: (v - v.mean(0)) / (v.var(0, correction=0) + 1).sqrt(),
    "normalized": lambda v, t: F.normalize(v + 3, dim=1),
    "pairs": lambda v, t: v @ v.T,
    "sorted": lambda v, t: v.sort(0).values,
    "differences": lambda v, t: v - v.flip(0),
    "a sum so far": lambda v, t: v.cumsum(0),
    "weights by frequency": lambda v, t: v / torch.bincount(t.clamp(min=0), minlength=CLASSES)[t.clamp(min=0), None],
    "largest only": lambda v, t: v.relu(),
    "without the largest": lambda v, t: v - v.max(),
    "rounded": lambda v, t: v.clamp(-0.5, 0.5),
}
TO_ROWS: dict[str, Function] = {
    "sum": lambda v, t: v.sum(1),
    "mean": lambda v, t: v.mean(1),
    "log sum exp": lambda v, t: v.logsumexp(1),
    "norm": lambda v, t: (v.square().sum(1) + 0.1).sqrt(),
    "cross entropy": lambda v, t: F.cross_entropy(v[:, :1].expand(-1, CLASSES) * torch.arange(3), t, reduction="none"),
}
MASKS: dict[str, Function] = {
    "none": lambda v, t: v,
    "multiplied": lambda v, t: v * kept(t),
    "selected": lambda v, t: v[kept(t)],
    "masked select": lambda v, t: v.masked_select(kept(t)),
    "index select": lambda v, t: v.index_select(0, kept(t).nonzero()[:, 0]),
    "where": lambda v, t: torch.where(kept(t), v, torch.zeros_like(v)),
    "filled": lambda v, t: v.masked_fill(~kept(t), 0.0),
    "hard examples": lambda v, t: v.topk(max(1, len(v) // 2)).values,
    "of one class": lambda v, t: v[t == 1],
    "a loop": lambda v, t: torch.stack([each * k for k, each in enumerate(v)]),
}
REDUCTIONS: dict[str, Function] = {
    "mean": lambda v, t: v.mean(),
    "sum": lambda v, t: v.sum(),
    "root of a mean": lambda v, t: (v.square().mean() + 0.1).sqrt(),
    "norm": lambda v, t: (v.square().sum() + 0.1).sqrt(),
    "variance": lambda v, t: (v - v.mean()).square().mean(),
    "log sum exp": lambda v, t: v.logsumexp(0),
    "mean of exp": lambda v, t: v.mean().exp(),
    "largest and smallest": lambda v, t: torch.cat([v, v.new_zeros(1)]).max() - torch.cat([v, v.new_zeros(1)]).min(),
    "product of means": lambda v, t: v.mean() * v.square().mean(),
    "ratio": lambda v, t: (2 * v.sum() + 1) / (v.square().sum() + 1),
}
COUNTS: dict[str, Function] = {
    "one": lambda t: 1,
    "len": lambda t: len(t),
    "numel": lambda t: t.numel(),
    "sum": lambda t: kept(t).sum(),
    "int": lambda t: max(int(kept(t).sum()), 1),
    "item": lambda t: kept(t).sum().item() + 1,
    "len of a selection": lambda t: len(t[kept(t)]) + 1,
    "share": lambda t: kept(t).double().mean() + 1,
    "count_nonzero": lambda t: torch.count_nonzero(kept(t)) + 1,
    "of classes": lambda t: len(t.unique()),
    "largest": lambda t: int(t.max()) + 200,
}


@dataclass(frozen=True)
class Loss:
    """A loss function, by the names of its steps."""

    on_values: tuple[str, ...]
    to_rows: str
    mask: str
    reduction: str
    count: str
    more: "Loss | None" = None
    metric: bool = False

    def __call__(self, output: Tensor, labels: Tensor) -> Any:
        values = output
        for name in self.on_values:
            values = ON_VALUES[name](values, labels)
        each = MASKS[self.mask](TO_ROWS[self.to_rows](values, labels), labels)
        loss = REDUCTIONS[self.reduction](each, labels) / COUNTS[self.count](labels)
        if self.more is not None:
            loss = loss + 0.5 * self.more(output, labels)
        if not self.metric:
            return loss
        hits = output.argmax(1) == labels
        return loss, {
            "hits": int(hits.sum()),
            "accuracy": hits.double().mean(),
            "each": hits,
            "largest": output.amax(0),
        }


def losses(more: bool = True) -> st.SearchStrategy[Loss]:
    names = [st.sampled_from(sorted(each)) for each in (TO_ROWS, MASKS, REDUCTIONS, COUNTS)]
    values = st.lists(st.sampled_from(sorted(ON_VALUES)), max_size=3).map(tuple)
    second = st.none() | losses(False) if more else st.none()
    return st.builds(Loss, values, *names, second, st.booleans() if more else st.just(False))


labels = st.lists(st.sampled_from([PAD, 0, 1, 2]), min_size=1, max_size=9).map(torch.tensor)


class Witness(nn.Module):
    """Notes in which threads, and for how many rows, it computes a forward that is not repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not gpipe.is_recomputing():
            self.seen.append((threading.get_ident(), len(x)))
        return x * 1


def witnessed() -> nn.Sequential:
    first, second, third = linears()
    return nn.Sequential(first, Witness(), second, Witness(), third)


def assert_piped(pipe: GPipe, count: int, chunks: int) -> None:
    """Check that each layer ran on a worker, once per micro-batch."""
    sizes = [len(each) for each in torch.zeros(count).chunk(chunks)]
    for layer in pipe:
        if isinstance(layer, Witness):
            threads, seen = zip(*layer.seen, strict=True)
            assert sorted(seen) == sorted(sizes)
            assert threading.get_ident() not in threads
            layer.seen.clear()


def plain(model: nn.Module, x: Tensor, loss_fn: Function, target: Any) -> tuple[Tensor, dict[str, Any]]:
    found = loss_fn(model(x), target)
    loss, metrics = found if isinstance(found, tuple) and not isinstance(found, LossSum) else (found, {})
    return loss.total / loss.count if isinstance(loss, LossSum) else loss, metrics


@settings(max_examples=4 * settings.default.max_examples)
@given(
    losses(),
    labels,
    st.integers(1, 9),
    st.sampled_from(MODES),
    st.sampled_from([None, *ALONE, "auto", "search", "looped_bfs"]),
)
def test_any_loss_is_that_of_the_plain_model(
    loss_fn: Loss, target: Tensor, chunks: int, mode: str, schedule: str | None
) -> None:
    """A schedule that cannot wait for the loss raises an error with a remedy, and changes nothing."""
    x, model, count = rows(len(target)), witnessed(), len(target)
    loss, metrics = plain(model, x, loss_fn, target)
    assume(bool(loss.isfinite()) and loss.requires_grad)
    with closing(piped(witnessed(), [2, 3], chunks=chunks, checkpoint=mode)) as pipe:
        waits = (
            schedule in (None, "fill_drain", "looped_bfs", "auto", "search")
            or len(torch.zeros(count).chunk(chunks)) == 1
        )
        if not waits:
            with pytest.raises(ValueError, match=r"not known how.*LossSum.*reduction=\"mean\".*torch's.*schedule="):
                pipe.step(x, target, loss_fn=loss_fn, schedule=schedule)
            assert all(p.grad is None for p in pipe.parameters())
            for layer in (pipe[1], pipe[3]):
                layer.seen.clear()
        found = pipe.step(x, target, loss_fn=loss_fn, schedule=schedule if waits else None)
        assert_piped(pipe, count, chunks)
        pipe.eval()
        for value in (found, pipe.evaluate(x, target, loss_fn=loss_fn)):
            torch.testing.assert_close(value, (loss.detach(), metrics) if metrics else loss.detach())
        assert_piped(pipe, count, chunks)
        loss.backward()
        assert_same(pipe, model)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def counted(output: Tensor, target: Tensor) -> LossSum:
    return LossSum((output - target).square().sum(), target.numel())


def unmarked(output: Tensor, target: Tensor):  # type: ignore[no-untyped-def]
    return counted(output, target)


def with_metrics(output: Tensor, target: Tensor) -> tuple[LossSum, dict[str, Any]]:
    return counted(output, target), {"rows": len(output)}


class Counted(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> LossSum:
        return counted(output, target)


class Says:
    def __call__(self, output: Tensor, target: "OnlyForCheckers") -> "LossSum":  # type: ignore[name-defined]  # noqa: F821
        return counted(output, target)


class Trainer:
    def loss(self, output: Tensor, target: Tensor) -> LossSum:
        return counted(output, target)

    def unmarked(self, output: Tensor, target: Tensor):  # type: ignore[no-untyped-def]
        return counted(output, target)


def squares(model: nn.Module) -> Tensor:
    return (model(rows()) - rows()).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "options", "before", "after"),
    [
        (mean, {}, "fill_drain", "fill_drain"),
        (mean, {"reduction": "mean"}, "1f1b", "1f1b"),
        (lambda o, t: (o - t).square().sum(), {"reduction": "sum", "normalizer": 18}, "1f1b", "1f1b"),
        (counted, {}, "1f1b", "1f1b"),
        (with_metrics, {}, "1f1b", "1f1b"),
        (Counted(), {}, "1f1b", "1f1b"),
        (Trainer().loss, {}, "1f1b", "1f1b"),
        (partial(counted), {}, "1f1b", "1f1b"),
        (Says(), {}, "1f1b", "1f1b"),
        (partial(unmarked), {}, "fill_drain", "1f1b"),
        (unmarked, {}, "fill_drain", "1f1b"),
        (Trainer().unmarked, {}, "fill_drain", "1f1b"),
        (lambda o, t: (counted(o, t), {"a": 1}), {}, "fill_drain", "fill_drain"),
        (F.mse_loss, {}, "1f1b", "1f1b"),
    ],
)
def test_step_uses_best_schedule_for_loss(loss_fn: Function, options: dict[str, Any], before: str, after: str) -> None:
    """A loss that has returned a LossSum is remembered; not with metrics, whose values would change."""
    model = linears()
    squares(model).backward()
    for schedule in (None, "auto", "AUTO"):
        with closing(piped(linears(), [1, 2], chunks=3)) as pipe:
            for name in (before, after):
                pipe.zero_grad()
                found = pipe.step(rows(), rows(), loss_fn=loss_fn, schedule=schedule, **options)
                assert pipe.last_schedule is not None
                assert pipe.last_schedule.name == name
                loss = found[0] if isinstance(found, tuple) else found
                torch.testing.assert_close(loss, squares(model).detach())
                assert_same(pipe, model)
                value = pipe.evaluate(rows(), rows(), loss_fn=loss_fn, **options)
                torch.testing.assert_close(value[0] if isinstance(value, tuple) else value, loss)


@pytest.mark.parametrize("schedule", [*ALONE, "zbv", "dualpipev"])
def test_loss_sum_works_with_every_schedule(schedule: str) -> None:
    model = linears(4)
    devices = ["cpu:0", "cpu:1", "cpu:1", "cpu:0"] if schedule in ("zbv", "dualpipev") else ["cpu"] * 4
    with closing(GPipe(linears(4), [1] * 4, devices=devices, chunks=3)) as pipe:
        pipe.step(rows(), rows(), loss_fn=unmarked, schedule=schedule)
        squares(model).backward()
        assert_same(pipe, model)


@pytest.mark.parametrize("text", ["F0 F1 B1 B0", "F0 F1 C B0 B1", "F1 F0 C B1 B0", "F0 F1 C I0 I1 W1 W0"])
@pytest.mark.parametrize("loss_fn", [mean, F.mse_loss, counted, lambda o, t: (o - t).square().mean(0).sum() / 3])
def test_custom_schedule_may_place_the_loss(text: str, loss_fn: Function) -> None:
    first = text.replace("C ", "")
    schedule, model = Schedule.parse(f"{first}\n{text}"), linears()
    with closing(piped(linears(), [1, 2], chunks=2, checkpoint="never")) as pipe, gpipe.record() as timeline:
        pipe.step(rows(), rows(), loss_fn=loss_fn, schedule=schedule)
    squares(model).backward()
    assert_same(pipe, model)
    waits = "C" in text or loss_fn not in (F.mse_loss, counted)
    assert sum(str(event) == "C@1" for event in timeline.events) == waits


def test_schedule_that_cannot_wait_raises_without_gradients() -> None:
    schedule = Schedule.parse("F0 B0 F1 B1")
    pipe = piped(linears(), [3], chunks=2)
    with pytest.raises(ValueError, match="the schedule starts backwards before all forwards have finished"):
        pipe.step(rows(), rows(), loss_fn=mean, schedule=schedule)
    assert all(p.grad is None for p in pipe.parameters())
    pipe.step(rows(), rows(), loss_fn=mean, reduction="mean", schedule=schedule)
    model = linears()
    squares(model).backward()
    assert_same(pipe, model)


def test_declared_reduction_must_match_loss() -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    for method in (pipe.step, pipe.evaluate):
        for reduction in ("mean", "sum"):
            with pytest.raises(ValueError, match=f"LossSum, which conflicts with reduction='{reduction}'"):
                method(rows(), rows(), loss_fn=counted, reduction=reduction)
        with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or None; got 'none'"):
            method(rows(), rows(), loss_fn=mean, reduction="none")
        for reduction in ("mean", None):
            with pytest.raises(ValueError, match="normalizer requires reduction='sum'"):
                method(rows(), rows(), loss_fn=mean, reduction=reduction, normalizer=2)

    def wrong(output: Tensor, target: Tensor) -> LossSum:
        return mean(output, target)  # type: ignore[return-value]

    with pytest.raises(ValueError, match="returned a scalar, but is annotated to return a LossSum"):
        pipe.step(rows(), rows(), loss_fn=wrong)
    assert all(p.grad is None for p in pipe.parameters())


def test_torch_loss_overrides_declared_reduction() -> None:
    """A mean over counted labels is not a mean over rows, even if the caller declares it."""
    target = torch.tensor([0, PAD, PAD, 1, 2, 0])
    model = linears()
    F.cross_entropy(model(rows()), target).backward()
    pipe = piped(linears(), [1, 2], chunks=3)
    pipe.step(rows(), target, loss_fn=F.cross_entropy, reduction="mean")
    assert_same(pipe, model)


@pytest.mark.parametrize(
    "target",
    [
        torch.tensor(2.0, dtype=DOUBLE),
        rows(1),
        Replicate(rows(1)),
        {"a": rows(), "b": 3.0, "c": "text", "d": [1, 2, 3, 4, 5, 6]},
        [rows(1), rows(2)],
        rows(4),
    ],
    ids=["a number", "one row", "replicated", "a dict", "a list", "other rows"],
)
def test_full_batch_loss_accepts_any_target(target: Any) -> None:
    given: list[Any] = []

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        given.append(target)
        return (output.sum(0) ** 2).mean()

    model, pipe = linears(), piped(linears(), [1, 2], chunks=3)
    loss = pipe.step(rows(), target, loss_fn=loss_fn)
    expected = loss_fn(model(rows()), target.value if isinstance(target, Replicate) else target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same(pipe, model)
    assert len(given) == 2
    assert str(given[0]) == str(given[1])


def test_a_loss_may_close_over_the_whole_batch() -> None:
    """A mask of the full batch could be broadcast to micro-batches of one row."""
    target, mask, model = rows(), torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=DOUBLE), linears()

    def loss_fn(output: Tensor) -> Tensor:
        return ((output - target).square().mean(1) * mask).sum() / mask.sum()

    for chunks in (2, 6):
        pipe = piped(linears(), [1, 2], chunks=chunks)
        model.zero_grad()
        expected = loss_fn(model(rows()))
        expected.backward()
        torch.testing.assert_close(pipe.step(rows(), loss_fn=loss_fn), expected.detach())
        assert_same(pipe, model)


def test_a_loss_with_a_state_changes_it_once() -> None:
    class Queue(nn.Module):
        """Compares with earlier rows, as MoCo does."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("earlier", torch.zeros(2, 3, dtype=DOUBLE))
            self.scale = nn.Parameter(torch.ones((), dtype=DOUBLE))

        def forward(self, output: Tensor) -> Tensor:
            found = (output @ self.earlier.T * self.scale).logsumexp(1).mean() - output.std(0).sum()
            self.earlier = torch.cat([self.earlier, output.detach()])[-5:]
            return found

    queues, model, pipe = [Queue(), Queue()], linears(), piped(linears(), [1, 2], chunks=4)
    for _ in range(3):
        loss = pipe.step(rows(), loss_fn=queues[0])
        expected = queues[1](model(rows()))
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    assert_same(pipe, model)
    torch.testing.assert_close(queues[0].state_dict(), queues[1].state_dict())
    torch.testing.assert_close(queues[0].scale.grad, queues[1].scale.grad)


class Loses(nn.Module):
    """A last layer that returns the loss."""

    def __init__(self, form: Function) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(x)


@pytest.mark.parametrize("form", [lambda x: x, lambda x: {"loss": x}, lambda x: (x[None].detach(), x)])
def test_loss_of_last_layer_needs_reduction(form: Function) -> None:
    model = nn.Sequential(*linears(2), Loses(lambda x: form(x.square().mean())))
    for options in ({"reduction": "mean"}, {"reduction": "sum", "normalizer": 3}):
        pipe = piped(nn.Sequential(*linears(2), model[2]), [2, 1], chunks=3)
        for method in (pipe.step, pipe.evaluate):
            with pytest.raises(ValueError, match=r"the last layer returned the loss.*reduction=\"sum\""):
                method(rows())
        loss = pipe.step(rows(), **options)
        expected = model[1](model[0](rows())).square().mean()
        model.zero_grad()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(pipe, model)
    pipe.chunks = 1
    torch.testing.assert_close(pipe.step(rows()), expected.detach())


@pytest.mark.parametrize(("spec", "times"), [(Mean(), 1), (Sum(), 3)])
def test_out_spec_declares_reduction(spec: Any, times: int) -> None:
    model = nn.Sequential(*linears(2), Loses(lambda x: x.square().mean()))
    pipe = piped(nn.Sequential(*linears(2), model[2]), [2, 1], chunks=3, out_spec=spec)
    loss = pipe.step(rows())
    (model(rows()) * times).backward()
    torch.testing.assert_close(loss, model(rows()).detach() * times)
    assert_same(pipe, model)


def test_last_layer_may_return_loss_sum() -> None:
    model = nn.Sequential(*linears(2), Loses(lambda x: LossSum(x.square().sum(), x.numel())))
    pipe = piped(model, [2, 1], chunks=3)
    torch.testing.assert_close(pipe.step(rows()), model[:2](rows()).square().mean().detach())


def test_memory_of_full_batch_loss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe = piped(linears(), [1, 2], chunks=3)
    with caplog.at_level(logging.WARNING, "gpipe"):
        pipe.step(rows(), rows(), loss_fn=F.mse_loss)
        pipe.step(rows(), rows(), loss_fn=mean, schedule="fill_drain")
        pipe.evaluate(rows(), rows(), loss_fn=mean)
        assert not caplog.records
        for _ in range(2):
            pipe.step(rows(), rows(), loss_fn=mean)
    (record,) = caplog.records
    for part in ("computed once", "1F1B", "gpipe.LossSum(total, count)", 'reduction="mean"', "F.cross_entropy"):
        assert part in record.getMessage()


def test_remembered_loss_functions_are_freed() -> None:
    seen, calls = SeenSums(), nullcontext()
    with calls:
        loss_fn = partial(unmarked)
        seen.add(loss_fn)
        assert loss_fn in seen
        assert partial(unmarked) not in seen
        trainer = Trainer()
        seen.add(trainer.unmarked)
        assert trainer.unmarked in seen
        assert Trainer().unmarked not in seen
    del loss_fn, trainer
    gc.collect()
    assert not seen._seen


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_single_micro_batch_works_under_any_schedule(schedule: str) -> None:
    devices = ["cpu:0", "cpu:1", "cpu:1", "cpu:0"] if schedule in ("zbv", "dualpipev") else ["cpu"] * 4
    model = linears(4)
    with closing(GPipe(linears(4), [1] * 4, devices=devices, chunks=1)) as pipe:
        pipe.step(rows(), rows(), loss_fn=mean, schedule=schedule)
        squares(model).backward()
        assert_same(pipe, model)

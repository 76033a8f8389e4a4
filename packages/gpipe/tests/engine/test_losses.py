"""The loss of the full mini-batch, and accompanying values, from a step and from ``evaluate()``."""

import copy
import weakref
from contextlib import AbstractContextManager, closing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe, LossSum
from profiler import AllocationTracker

from ..layers import DOUBLE, MODES, AddsLoss, Call, assert_same, gradients, linears, piped, rows
from ..schedules import ALONE, each_schedule


def total(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {"loss_fn": F.mse_loss},
    "sum": {"loss_fn": total, "reduction": "sum", "normalizer": 5},
    "counted": {"loss_fn": lambda output, target: LossSum(total(output, target), output.numel())},
    "whole": {"loss_fn": lambda output, target: F.mse_loss(output, target).sqrt() + output.std(0).sum()},
    "metrics": {"loss_fn": lambda output, target: (F.mse_loss(output, target), {"each": (output - target).sum(1)})},
    "random": {"loss_fn": lambda output, target: F.mse_loss(F.dropout(output), target)},
    "random by rows": {"loss_fn": lambda output, target: F.mse_loss(F.dropout(output), target), "reduction": "mean"},
}


def model(dropout: bool) -> nn.Sequential:
    first, second, third = linears()
    return nn.Sequential(first, nn.Dropout(0.5 if dropout else 0.0), second, nn.BatchNorm1d(3, dtype=DOUBLE), third)


def way(pipe: GPipe, inline: bool) -> AbstractContextManager[Any]:
    return gpipe.inline() if inline else closing(pipe)


@settings(max_examples=settings.default.max_examples // 3)
@given(
    st.integers(2, 3), st.integers(1, 4), st.sampled_from(sorted(LOSSES)), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(ALONE), st.sampled_from(MODES), st.booleans(),
)  # fmt: skip
def test_it_gives_what_a_step_would_give(
    each: int,
    chunks: int,
    loss: str,
    training: bool,
    inline: bool,
    outputs: bool,
    schedule: str,
    mode: str,
    drops: bool,
):
    """Layers keep their mode, and use the same random numbers."""
    count = each * chunks
    options: dict[str, Any] = {**LOSSES[loss], "return_outputs": outputs}
    pipe = piped(model(drops), [2, 1, 2], chunks=chunks, checkpoint=mode).train(training)
    twin = copy.deepcopy(pipe)
    before = copy.deepcopy(pipe.state_dict())
    with way(pipe, inline):
        for _ in range(2):
            torch.manual_seed(3)
            found = pipe.evaluate(rows(count), rows(count), **options)
    if not training:
        torch.testing.assert_close(pipe.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert pipe.training is training
    with way(twin, inline):
        torch.manual_seed(3)
        waits = "reduction" not in options and options["loss_fn"] is not F.mse_loss
        expected = twin.step(rows(count), rows(count), schedule=None if waits else schedule, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(found))


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_no_output_outlives_its_loss(inline: bool, grad: Any):
    """At most one output is alive at a time, however many micro-batches there are."""
    pipe = piped(linears(), [1, 2], chunks=6)
    alive: list[weakref.ref[Tensor]] = []
    most = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert not output.requires_grad
        assert not torch.is_grad_enabled()
        most.append(sum(each() is not None for each in alive))
        alive.append(weakref.ref(output.untyped_storage()))
        return F.mse_loss(output, target)

    with way(pipe, inline), grad():
        loss = pipe.evaluate(rows(6, grad=True), rows(6), loss_fn=loss_fn, reduction="mean")
    torch.testing.assert_close(loss, F.mse_loss(linears()(rows(6)), rows(6)).detach())
    assert len(most) == 6
    assert max(most) == 0


def test_a_loss_need_not_be_differentiable():
    pipe, plain = piped(linears(), [1, 2], chunks=3), linears()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])

    def right(output: Tensor, target: Tensor) -> Any:
        return LossSum((output.argmax(1) == target).sum(), len(target))

    accuracy = pipe.evaluate(rows(7), labels, loss_fn=right)
    torch.testing.assert_close(accuracy.item(), (plain(rows(7)).argmax(1) == labels).double().mean().item())
    with pytest.raises(ValueError, match=r"does not require grad.*use pipe\.evaluate"):
        pipe.step(rows(7), labels, loss_fn=right)


def metrics_of(output: Tensor, target: Tensor) -> dict[str, Any]:
    each = (output - target).square().mean(1)
    return {
        "rows": each,
        "tokens": output.flatten(),
        "mean": each.mean(),
        "share": (each > 1).sum() / len(each),
        "number": each.mean().item(),
    }


def mean(output: Tensor, target: Tensor) -> Any:
    return F.mse_loss(output, target), metrics_of(output, target)


def counted(output: Tensor, target: Tensor) -> Any:
    return LossSum((output - target).square().sum(), output.numel()), metrics_of(output, target)


MEASURED: list[tuple[Any, dict[str, Any]]] = [(mean, {"reduction": "mean"}), (mean, {}), (counted, {})]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.integers(1, 9), st.integers(1, 5), st.sampled_from(ALONE),
    st.sampled_from(MODES), st.sampled_from(MEASURED), st.booleans(), st.booleans(),
)  # fmt: skip
def test_metrics_are_those_of_the_whole_mini_batch(
    count: int, chunks: int, schedule: str | None, mode: str, measured: Any, inline: bool, outputs: bool
):
    loss_fn, options = measured
    whole = loss_fn is mean and not options
    schedule = None if whole else schedule
    plain = linears()
    pipe = piped(plain, [1, 2], chunks=chunks, checkpoint=mode)
    output = plain(rows(count))
    F.mse_loss(output, rows(count)).backward()
    expected = (F.mse_loss(output, rows(count)), metrics_of(output, rows(count)), *([output] if outputs else []))
    expected = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, expected)
    seen: list[list[float]] = []

    def once(output: Tensor, target: Tensor) -> Any:
        """The last stage may be checkpointed; then the loss is computed in its recomputation."""
        assert not gpipe.is_checkpointing()
        assert not gpipe.is_recomputing()
        seen.append(target[:, 0].tolist())
        return loss_fn(output, target)

    with way(pipe, inline):
        found = pipe.step(rows(count), rows(count), loss_fn=once, schedule=schedule, return_outputs=outputs, **options)
        parts = rows(count).chunk(1 if whole or (loss_fn is counted and schedule == "fill_drain") else chunks)
        assert sorted(seen) == sorted(part[:, 0].tolist() for part in parts)
        again = pipe.evaluate(rows(count), rows(count), loss_fn=loss_fn, return_outputs=outputs, **options)
    for each in (found, again):
        assert isinstance(each, tuple)
        assert list(each[1]) == list(expected[1])
        torch.testing.assert_close(each, expected, check_dtype=False)
        assert each[1]["mean"].dtype == expected[1]["mean"].dtype
        assert isinstance(each[1]["number"], float)
        assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(each) if isinstance(t, Tensor))
    assert_same(pipe, plain)


def test_full_batch_loss_gets_private_memory() -> None:
    """It may modify the outputs in place, and the caller gets them unmodified."""

    def loss_fn(output: Tensor) -> Tensor:
        output.mul_(2).add_(1)
        return output.square().mean().sqrt()

    for chunks in (1, 3):
        model, pipe = linears(), piped(linears(), [1, 2], chunks=chunks)
        loss, outputs = pipe.step(rows(), loss_fn=loss_fn, return_outputs=True)
        output = model(rows())
        expected = loss_fn(output * 1)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(outputs, output.detach())
        assert_same(pipe, model)


def test_loss_in_place_on_some_micro_batches():
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if target[0, 0] == 6:  # the second micro-batch
            output.mul_(2)
        return output.square().mean()

    model = linears()
    pipe, x, targets = piped(model, [1, 2], chunks=3), rows(), torch.arange(18.0, dtype=DOUBLE).view(6, 3)
    pipe.step(x, targets, loss_fn=loss_fn, reduction="mean")
    factors = torch.tensor([1, 1, 2, 2, 1, 1], dtype=DOUBLE)[:, None]
    (model(x) * factors).square().mean().backward()
    assert_same(pipe, model)


@pytest.mark.parametrize("inline", [False, True])
def test_full_batch_loss_is_freed(inline: bool) -> None:
    held: list[weakref.ref[Any]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        held.extend(map(weakref.ref, (output, target)))
        found = (output - target).exp().std()
        held.append(weakref.ref(found))
        return found

    pipe = piped(linears(), [1, 2], chunks=3)
    with way(pipe, inline):
        pipe.step(rows(grad=True) * 1, rows() * 1, loss_fn=loss_fn)
        pipe.evaluate(rows(), rows() * 1, loss_fn=loss_fn)
        assert [each() for each in held] == [None] * 6


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain", None])
@pytest.mark.parametrize("count", [2, 2.0, True, torch.tensor(2), torch.tensor([[2.0]], dtype=DOUBLE)])
def test_counts_are_any_numbers(count: Any, schedule: str | None):
    """Counts of all micro-batches, or one of the whole, are divided by."""
    model = linears()
    pipe = piped(model, [1, 2], chunks=3)
    loss = pipe.step(
        rows(), rows(), loss_fn=lambda o, t: LossSum(F.mse_loss(o, t, reduction="sum"), count), schedule=schedule
    )
    times = 3 if schedule == "1f1b" else 1
    expected = F.mse_loss(model(rows()), rows(), reduction="sum") / (times * int(count))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same(pipe, model)


@pytest.mark.parametrize("schedule", ["1f1b", None])
def test_zero_count_gives_nan_loss_and_zero_gradients(schedule: str | None) -> None:
    pipe = piped(linears(), [1, 2], chunks=3)
    for zero in (0, torch.tensor(0), torch.tensor(0.0)):
        loss_fn = lambda o, t, zero=zero: LossSum((o * 0).sum(), zero)  # noqa: E731
        assert pipe.step(rows(), rows(), loss_fn=loss_fn, schedule=schedule).isnan()
        assert all(not parameter.grad.any() for parameter in pipe.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_counted_loss_may_overflow(dtype: torch.dtype):
    def loss_fn(output: Tensor, target: Tensor) -> LossSum:
        return LossSum(F.mse_loss(output, target, reduction="sum"), target.numel())

    model, x, y = linears().to(dtype), rows(8).to(dtype), torch.full((8, 3), 100.0, dtype=dtype)
    expected = F.mse_loss(model(x), y)
    expected.backward()
    for chunks, overflows in ((4, False), (1, dtype is torch.float16)):
        with closing(piped(linears().to(dtype), [1, 2], chunks=chunks)) as pipe:
            loss = pipe.step(x, y, loss_fn=loss_fn)
            torch.testing.assert_close(loss, expected.detach() / (0 if overflows else 1))
            torch.testing.assert_close(pipe.evaluate(x, y, loss_fn=loss_fn), loss)
            torch.testing.assert_close(gradients(pipe), gradients(model), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("normalizer", [0, torch.tensor(0)])
def test_zero_normalizer_raises_before_running(normalizer: Any) -> None:
    pipe = piped(linears(), [1, 2], chunks=3)
    with pytest.raises(ValueError, match="normalizer must not be 0"):
        pipe.step(rows(), rows(), loss_fn=F.mse_loss, reduction="sum", normalizer=normalizer)
    assert all(p.grad is None for p in pipe.parameters())


def test_full_batch_loss_uses_autocast_of_caller() -> None:
    seen: list[torch.dtype] = []

    def loss_fn(output: Tensor) -> Tensor:
        seen.append((output @ output.T).dtype)
        return output.float().std()

    model, x = linears().float(), rows().float()
    for each in (piped(model, [1, 2], chunks=3), model):
        with torch.autocast("cpu", torch.bfloat16):
            found = each.step(x, loss_fn=loss_fn) if isinstance(each, GPipe) else loss_fn(each(x))
    assert seen == [torch.bfloat16] * 2
    assert found.isfinite()


def peak(chunks: int, schedule: str, mode: str) -> int:
    """The most bytes in a step with outputs of 32 KiB for each micro-batch, and little else."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 4096))
    pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode)
    x, labels = torch.randn(2 * chunks, 3), torch.zeros(2 * chunks, dtype=torch.int64)
    with gpipe.inline():
        pipe.step(x, labels, loss_fn=F.cross_entropy, schedule=schedule)
        pipe.zero_grad()
        with AllocationTracker() as tracker:
            pipe.step(x, labels, loss_fn=F.cross_entropy, schedule=schedule)
    return tracker.peak


@each_schedule
@settings(max_examples=max(2, settings.default.max_examples // 10))
@given(few=st.integers(3, 6), more=st.integers(1, 12))
def test_loss_memory_does_not_grow_with_chunks(schedule: str, few: int, more: int) -> None:
    """If the last stage is checkpointed, the loss is computed in its recomputation."""
    grown = peak(few + more, schedule, "always") - peak(few, schedule, "always")
    assert grown < 4096 * more


@each_schedule
def test_hooks_inside_layers_see_gradient_of_sum(schedule: str) -> None:
    """Hooks of parameters, with a count, see the gradient of the mean."""
    inside, own = list[Tensor](), list[Tensor]()

    def act(x: Tensor) -> Tensor:
        y = x.tanh()
        y.register_hook(inside.append)
        return y

    def mean(output: Tensor) -> LossSum:
        return LossSum(output.sum(), output.numel())

    model = nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE), Call(act))
    with closing(piped(model, [1, 1], chunks=2)) as pipe:
        pipe[0].weight.register_hook(own.append)
        x = rows(4)
        pipe.step(x, loss_fn=mean, schedule=schedule)
        assert len(inside) == 2
        assert all(torch.equal(gradient, torch.ones(2, 3, dtype=DOUBLE)) for gradient in inside)
        y = model[0](x).tanh().mean()
        expected = torch.autograd.grad(y, model[0].weight)[0]
        torch.testing.assert_close(own, [expected])


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def summed(output: Tensor) -> LossSum:
    return LossSum(output.square().sum(), output.numel())


RULES: dict[str, dict[str, Any]] = {
    "whole": {"loss_fn": mean_square},
    "mean": {"loss_fn": mean_square, "reduction": "mean"},
    "sum": {"loss_fn": lambda output: output.square().sum(), "reduction": "sum", "normalizer": 24},
    "counted": {"loss_fn": summed},
}


class Experts(nn.Linear):
    """A layer with its own loss, which its backward adds, or which it returns with one entry per row."""

    how = "none"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        loss = y.tanh().mean()
        if self.how == "backward":
            y = AddsLoss.apply(y, loss)
        return y, (loss if self.how == "returned" else torch.zeros_like(loss)).expand(len(x))


def own_gradient(how: str, chunks: int, rule: str, schedule: str) -> Tensor:
    """Return the gradient of the experts in the second step, when their outputs are known."""
    torch.manual_seed(0)
    experts = Experts(3, 3, dtype=DOUBLE)
    experts.how = how
    options = dict(RULES[rule])
    loss_fn = options.pop("loss_fn")

    def with_experts(output: tuple[Tensor, Tensor]) -> Any:
        found, own = loss_fn(output[0]), output[1]
        if rule == "counted":
            return LossSum(found.total + own.mean() * found.count, found.count)
        return found + (own.sum() * 3 if rule == "sum" else own.mean())

    with closing(GPipe(nn.Sequential(*linears(1), experts), [1, 1], devices=["cpu"] * 2, chunks=chunks)) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(rows(8), loss_fn=with_experts, schedule=schedule, **options)
    assert experts.weight.grad is not None
    return experts.weight.grad


@settings(max_examples=settings.default.max_examples // 4)
@given(st.sampled_from([1, 2, 4]), st.sampled_from(sorted(RULES)), st.sampled_from(["fill_drain", "zero_bubble"]))
def test_losses_of_layers_are_averaged_or_summed(chunks: int, rule: str, schedule: str) -> None:
    if rule == "whole" and schedule == "zero_bubble":
        schedule = "fill_drain"  # the other one cannot wait
    without = own_gradient("none", chunks, rule, schedule)
    returned = own_gradient("returned", chunks, rule, schedule) - without
    plain = own_gradient("returned", 1, rule, schedule) - own_gradient("none", 1, rule, schedule)
    torch.testing.assert_close(returned, plain)
    # All that flows is divided by the count, 24 numbers, at the end.
    added = own_gradient("backward", chunks, rule, schedule) - without
    torch.testing.assert_close(added, plain * chunks / (24 if rule == "counted" else 1))

"""``step()`` leaves what forward and backward of the plain model leave, under every schedule that is one."""

from __future__ import annotations

import copy
import gc
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

import gpipe
from gpipe import GPipe
from gpipe.schedule import SCHEDULES, Schedule, fill_drain, in_flight, one_forward_one_backward, v_placement
from gpipe.skip import pop, skippable, stash

from ..layers import DOUBLE, Call, Raise, assert_same, gradients, linears, piped, rows, within
from ..models import PARTS, Recipe, recipes
from ..schedules import ALONE, CHOICES, LOOPED, V_SHAPED, fitting, some_schedule
from ..test_models import Oracle, assert_close
from ..test_models import step as optimize

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("never", "except_last", "always")
STEADY = tuple(name for name, part in PARTS.items() if not part.draws)
SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])

each_mode = pytest.mark.parametrize("mode", MODES)
each_schedule = pytest.mark.parametrize("schedule", ALONE)


@dataclass(frozen=True)
class Way:
    """How to call ``step()``; all ways lead to the same gradients."""

    schedule: str
    loss: str
    workers: int
    numbered: bool
    inline: bool

    def devices(self, stages: int) -> list[str]:
        """Workers as the schedule wants them; else some that divide the stages evenly, or one for each."""
        if self.schedule in V_SHAPED and stages % 2 == 0:
            return [f"cpu:{worker}" for worker in v_placement(stages)]
        workers = self.workers if stages % self.workers == 0 else stages
        return [f"cpu:{j % workers}" for j in range(stages)] if self.numbered else ["cpu"] * stages

    def name(self, stages: int) -> str:
        """The schedule, or another one if it wants an even number of stages."""
        return "zero_bubble" if self.schedule in V_SHAPED and stages % 2 else self.schedule

    def where(self) -> AbstractContextManager[None]:
        return gpipe.inline() if self.inline else nullcontext()


NOT_CONTIGUOUS = Recipe(
    layers=(*[("tensor", "linear")] * 4, ("tensor", "gelu"), ("tensor", "random lstm")),
    skips=(),
    frozen=frozenset(range(6)),
    balance_seed=0,
    stages=2,
    rows=(2, 2),
    chunks=1,
    checkpoint="never",
    dtype=DOUBLE,
    training=True,
    input_needs_grad=True,
    seed=0,
)
"""The gradient that the last layer sends back is laid out in memory otherwise than what it was given."""

ways = st.builds(
    Way, st.sampled_from(sorted(SCHEDULES)), st.sampled_from(["mean", "sum", "counted"]), st.integers(1, 3),
    st.booleans(), st.booleans(),
)  # fmt: skip


def weights_for(output: Any, seed: int) -> list[Tensor]:
    """For each number of the output, what it counts in the loss."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(t.shape, generator=generator, dtype=DOUBLE).to(t.dtype) for t in floats(output)]


def floats(output: Any) -> list[Tensor]:
    return [t for t in _pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def losses(output: Any, weights: list[Tensor]) -> Tensor:
    """One for each row."""
    each = [(t * w).flatten(1).sum(1) for t, w in zip(floats(output), weights, strict=True)]
    return torch.stack(each).sum(0)


def counted(output: Any, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    return losses(output, weights).sum(), weights[0].sum()


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any]]] = {
    "mean": (lambda output, weights: losses(output, weights).mean(), {}),
    "sum": (lambda output, weights: losses(output, weights).sum(), {"reduction": "sum", "normalizer": 7}),
    "counted": (counted, {}),
}


def whole(loss: str, output: Any, weights: list[Tensor]) -> Tensor:
    """The loss of the mini-batch, as somebody without a pipe computes it."""
    found = LOSSES[loss][0](output, weights)
    if isinstance(found, tuple):
        return found[0] / found[1]
    return found / LOSSES[loss][1].get("normalizer", 1)


def pipe_of(recipe: Recipe, way: Way, model: nn.Sequential, checkpoint: str | None = None) -> GPipe:
    balance = recipe.balance(len(model))
    return GPipe(
        copy.deepcopy(model),
        balance,
        devices=way.devices(len(balance)),
        chunks=recipe.chunks,
        checkpoint=checkpoint or recipe.modes(len(balance)),
        deferred_batch_norm=recipe.deferred,
    )


def plainly(oracle: Oracle, x: Tensor, way: Way, recipe: Recipe) -> tuple[dict[str, Any], list[Tensor]] | None:
    """All that one step of training leaves behind, and the weights of the loss; None if there is nothing to train."""
    oracle.zero_grad()
    leaf = x.clone().requires_grad_(recipe.input_needs_grad)
    output = oracle(leaf * 1)
    weights = weights_for(output, recipe.seed)
    loss = whole(way.loss, output, weights)
    if not loss.requires_grad:
        return None
    loss.backward()
    return left(oracle, loss, output, leaf), weights


def left(model: nn.Module, loss: Tensor, output: Any, leaf: Tensor) -> dict[str, Any]:
    parameters = {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}
    output = _pytree.tree_map_only(Tensor, Tensor.detach, output)
    return {"loss": loss.detach(), "output": output, "input": leaf.grad, **parameters}


def stepped(pipe: GPipe, x: Tensor, weights: Any, way: Way, recipe: Recipe, **options: Any) -> dict[str, Any]:
    pipe.zero_grad()
    leaf = x.clone().requires_grad_(recipe.input_needs_grad)
    loss_fn, how = LOSSES[way.loss]
    options = {"schedule": way.name(len(pipe.partitions)), **how, **options}
    with way.where():
        loss, output = pipe.step(leaf * 1, weights, loss_fn=loss_fn, return_outputs=True, **options)
    assert not any(t.requires_grad for t in [loss, *floats(output)])
    return left(pipe, loss, output, leaf)


@SLOW
@given(recipes(STEADY), ways)
def test_step_is_forward_and_backward_of_the_model(recipe: Recipe, way: Way):
    model = recipe.model()
    with closing(pipe_of(recipe, way, model)) as pipe:
        oracle = Oracle(recipe, model)
        for x in recipe.batches():
            expected = plainly(oracle, x, way, recipe)
            if expected is None:
                with pytest.raises(ValueError, match="does not require grad"):
                    pipe.step(x, loss_fn=lambda output, _: floats(output)[0].sum())
                return
            assert_close(stepped(pipe, x, expected[1], way, recipe), expected[0], recipe)
            optimize(model)
            optimize(pipe)
        assert_close(dict(pipe.state_dict()), dict(model.state_dict()), recipe)


def lived(recipe: Recipe, way: Way, checkpoint: str | None = None) -> list[Any]:
    """What two steps of training leave behind."""
    return lived_by(pipe_of(recipe, way, recipe.model(), checkpoint), recipe, way)


def lived_by(pipe: GPipe, recipe: Recipe, way: Way) -> list[Any]:
    """The same of ``pipe``, which is closed."""
    results: list[Any] = []
    with closing(pipe):
        with torch.no_grad():
            weights = [weights_for(pipe(x.clone()), recipe.seed) for x in recipe.batches()]
        torch.manual_seed(recipe.seed)
        for x, w in zip(recipe.batches(), weights, strict=True):
            results.append(stepped(pipe, x, w, way, recipe))
            optimize(pipe)
        return [*results, dict(pipe.state_dict())]


@settings(SLOW, max_examples=SLOW.max_examples // 4)
@given(recipes(), ways)
def test_schedules_agree_about_random_numbers(recipe: Recipe, way: Way):
    """From one seed every schedule draws the same masks; sums over micro-batches may come in another order."""
    recipe = replace(recipe, training=True, input_needs_grad=True, dtype=DOUBLE)
    expected = lived(recipe, way)
    for schedule in {*SCHEDULES} - {way.schedule}:
        assert_close(lived(recipe, replace(way, schedule=schedule)), expected, recipe)


@settings(SLOW, max_examples=SLOW.max_examples // 2)
@given(recipes(), ways, st.sampled_from(MODES))
@example(recipe=NOT_CONTIGUOUS, way=Way("1f1b", "mean", 1, False, False), mode="never")
def test_split_backward_and_recomputation_are_exact(recipe: Recipe, way: Way, mode: str):
    """Not only nearly: these do the same operations in the same order, on any thread."""
    recipe = replace(recipe, training=True, input_needs_grad=True, checkpoint="always")
    expected = lived(recipe, replace(way, schedule="1f1b"))
    found = lived(recipe, replace(way, schedule="zero_bubble", inline=True), mode)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """Any schedule at all; micro-batches, stages, checkpoints."""
    m, n = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    stop = draw(st.sampled_from([0, m - 1, m]))
    return some_schedule(draw(CHOICES), m, range(n), stop), m, n, stop


@settings(max_examples=settings.default.max_examples // 2)
@given(orders(), st.booleans())
def test_any_order_that_is_valid_is_right(order: tuple[Schedule, int, int, int], inline: bool):
    schedule, m, n, stop = order
    model, x, target = linears(n), rows(m * 2), rows(m * 2)
    mode = {0: "never", m: "always"}.get(stop, "except_last")
    with closing(piped(model, [1] * n, chunks=m, checkpoint=mode)) as pipe:
        with gpipe.inline() if inline else nullcontext():
            loss = pipe.step(x, target, loss_fn=F.mse_loss, schedule=schedule)
        expected = F.mse_loss(model(x), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(pipe, model)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@each_mode
def test_written_and_read_back(schedule: str, mode: str):
    model, m, placement = linears(4), 5, v_placement(4) if schedule in V_SHAPED else [0, 1, 0, 1]
    devices = [f"cpu:{worker}" for worker in placement]
    with closing(GPipe(copy.deepcopy(model), [1] * 4, devices=devices, chunks=m, checkpoint=mode)) as pipe:
        stop = {"never": 0, "except_last": m - 1, "always": m}[mode]
        text = str(SCHEDULES[schedule](m, placement, stop))
        pipe.step(rows(m), rows(m), loss_fn=F.mse_loss, schedule=Schedule.parse(text))
        F.mse_loss(model(rows(m)), rows(m)).backward()
        assert_same(pipe, model)


@pytest.mark.parametrize("schedule", [*LOOPED, *V_SHAPED])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("m", [1, 3, 7])
def test_stages_that_share_workers_train_like_the_model(schedule: str, mode: str, inline: bool, m: int):
    """With fewer micro-batches than stages, and with more; whether backwards are still split or not any more."""
    model, placement = linears(6), fitting(schedule, workers=3, loops=2)
    devices = [f"cpu:{worker}" for worker in placement]
    with closing(GPipe(copy.deepcopy(model), [1] * 6, devices=devices, chunks=m, checkpoint=mode)) as pipe:
        for step in range(5):
            x, target = rows(m * 2) * (step + 1), rows(m * 2)
            with gpipe.inline() if inline else nullcontext():
                loss = pipe.step(x, target, loss_fn=F.mse_loss, schedule=schedule)
            expected = F.mse_loss(model(x), target)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            assert_same(pipe, model)
        assert pipe.last_schedule.name == schedule


@each_mode
@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu:0", "cpu:0"]])
@pytest.mark.parametrize("text", ["F0 F1 B0 B1\nF0 B0 F1 B1", "F0@0 F0@1 B0@1 F1@0 B0@0 F1@1 I1@1 W1@1 B1@0"])
def test_recomputations_that_are_left_out_are_done_all_the_same(mode: str, devices: list[str], text: str):
    model, calls = linears(), []
    pipe = GPipe(copy.deepcopy(model), [1, 2], devices=devices, chunks=2, checkpoint=mode)
    pipe[1].register_forward_hook(lambda *_: calls.append(gpipe.is_recomputing()))
    pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=Schedule.parse(text))
    F.mse_loss(model(rows()), rows()).backward()
    assert_same(pipe, model)
    assert sum(calls) == {"never": 0, "except_last": 1, "always": 2}[mode]
    pipe.close()


@each_schedule
@each_mode
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rows_that_cannot_be_dealt_evenly(schedule: str, mode: str, count: int):
    model = linears()
    with closing(piped(model, [1, 1, 1], chunks=4, checkpoint=mode)) as pipe:
        x, y = rows(count, grad=True), rows(count, grad=True)
        pipe.step(x, rows(count), loss_fn=F.mse_loss, schedule=schedule)
        F.mse_loss(model(y), rows(count)).backward()
        assert_same(pipe, model)
        torch.testing.assert_close(x.grad, y.grad)


@each_schedule
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_gradients_of_several_steps_add_up(schedule: str, loss: str):
    model, weights = linears(), [rows().abs()]
    pipe = piped(model, [2, 1], chunks=3)
    for k in range(3):
        loss_fn, how = LOSSES[loss]
        pipe.step(rows() + k, weights, loss_fn=loss_fn, schedule=schedule, **how)
        whole(loss, model(rows() + k), weights).backward()
    pipe(rows()).square().sum().backward()
    model(rows()).square().sum().backward()
    assert_same(pipe, model)


@each_schedule
def test_gradients_flow_on_into_what_computed_the_input(schedule: str):
    torch.manual_seed(0)
    embeddings = [nn.Embedding(5, 3, dtype=DOUBLE)]
    embeddings.append(copy.deepcopy(embeddings[0]))
    model, tokens = linears(), torch.arange(6) % 5
    pipe = piped(model, [2, 1], chunks=4)
    loss = pipe.step(embeddings[0](tokens), rows(), loss_fn=lambda o, t: (F.mse_loss(o, t, reduction="sum"), o.numel()),
                     schedule=schedule)  # fmt: skip
    expected = F.mse_loss(model(embeddings[1](tokens)), rows())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(embeddings[0].weight.grad, embeddings[1].weight.grad)


class TestValues:
    def test_tuples_and_dicts(self) -> None:
        model = nn.Sequential(Call(lambda v: {"sum": v[0] + v[1], "ids": v[2]}), nn.Identity())
        pipe, inputs = piped(model, [1, 1], chunks=4), [rows(grad=True) for _ in range(2)]
        target = {"where": [rows()], "none": None}
        seen: list[Any] = []

        def loss_fn(output: Any, target: Any) -> Tensor:
            seen.append((output, target))
            return F.mse_loss(output["sum"], target["where"][0])

        loss, output = pipe.step((*inputs, torch.arange(6)), target, loss_fn=loss_fn, return_outputs=True)
        torch.testing.assert_close(loss, F.mse_loss(2 * rows(), rows()))
        torch.testing.assert_close(output, {"sum": 2 * rows(), "ids": torch.arange(6)})
        assert [t["none"] for _, t in seen] == [None] * 3
        assert [len(o["ids"]) for o, _ in seen] == [2, 2, 2]
        for leaf in inputs:
            torch.testing.assert_close(leaf.grad, 2 * rows() / rows().numel())

    def test_keywords(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
                return super().forward(x * scale)

        torch.manual_seed(0)
        model = nn.Sequential(Scaled(3, 3, dtype=DOUBLE), nn.Linear(3, 3, dtype=DOUBLE))
        pipe = piped(model, [1, 1], chunks=2)
        arguments = gpipe.Arguments((rows(),), {"scale": rows()})
        pipe.step(arguments, rows(), loss_fn=F.mse_loss)
        F.mse_loss(model[1](model[0](rows(), scale=rows())), rows()).backward()
        assert_same(pipe, model)

    def test_no_target(self) -> None:
        model, seen = linears(), []
        pipe = piped(model, [1, 2], chunks=3)
        pipe.step(rows(), loss_fn=lambda output, target: (seen.append(target), output.square().mean())[1])
        model(rows()).square().mean().backward()
        assert seen == [None] * 3
        assert_same(pipe, model)

    @each_schedule
    def test_outputs_are_those_of_the_forward(self, schedule: str) -> None:
        pipe = piped(linears(), [1, 2], chunks=4)
        loss, output = pipe.step(rows(7), rows(7), loss_fn=F.mse_loss, schedule=schedule, return_outputs=True)
        assert torch.equal(output, pipe(rows(7)))
        torch.testing.assert_close(loss, F.mse_loss(output, rows(7)))

    def test_targets_get_no_gradient(self) -> None:
        pipe, target = piped(linears(), [1, 2], chunks=2), rows(grad=True)
        pipe.step(rows(), target, loss_fn=F.mse_loss)
        assert target.grad is None

    def test_input_and_target_stay_as_they_are(self) -> None:
        model = nn.Sequential(nn.ReLU(inplace=True), *linears())
        pipe, x, target = piped(model, [1, 3], chunks=2), rows(), rows()
        pipe.step(x, target, loss_fn=F.mse_loss)
        assert torch.equal(x, rows())
        assert torch.equal(target, rows())

    @each_schedule
    @each_mode
    def test_skips(self, schedule: str, mode: str) -> None:
        @skippable(stash=["skip"])
        class Stash(nn.Module):
            def forward(self, x: Tensor) -> Any:
                yield stash("skip", x * 2)
                return x

        @skippable(pop=["skip"])
        class Pop(nn.Module):
            def forward(self, x: Tensor) -> Any:
                skip = yield pop("skip")
                return x + skip

        a, b, c = linears()
        pipe = piped(nn.Sequential(a, Stash(), b, c, Pop()), [2, 1, 1, 1], chunks=4, checkpoint=mode)
        pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule)
        h = a(rows())
        F.mse_loss(c(b(h)) + 2 * h, rows()).backward()
        found = [p.grad for p in pipe.parameters()]
        torch.testing.assert_close(found, [p.grad for layer in (a, b, c) for p in layer.parameters()])
        pipe.close()

    @each_schedule
    @each_mode
    def test_deferred_batch_norm(self, schedule: str, mode: str) -> None:
        """Running statistics are those of the plain layer on the whole mini-batch, whatever is recomputed when."""
        plain = nn.BatchNorm1d(3, dtype=DOUBLE)
        model = nn.Sequential(copy.deepcopy(plain), *linears())
        pipe = piped(model, [1, 1, 2], chunks=3, checkpoint=mode, deferred_batch_norm=True)
        for k in range(2):
            pipe.step(rows(8) * (k + 1), rows(8), loss_fn=F.mse_loss, schedule=schedule)
            plain(rows(8) * (k + 1))
        torch.testing.assert_close(dict(pipe[0].named_buffers()), dict(plain.named_buffers()))
        pipe.close()


class TestRandomNumbers:
    @each_schedule
    @each_mode
    def test_same_masks_as_forward_and_backward(self, schedule: str, mode: str) -> None:
        model = nn.Sequential(*linears()[:1], nn.Dropout(0.5), *linears()[1:], nn.Dropout(0.5))
        pipe, results = piped(model, [2, 1, 2], chunks=4, checkpoint=mode), []
        for way in ("step", "forward"):
            pipe.zero_grad()
            torch.manual_seed(5)
            if way == "step":
                _, output = pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule, return_outputs=True)
            else:
                output = pipe(rows())
                F.mse_loss(output, rows()).backward()
            results.append((output.detach(), gradients(pipe)))
        torch.testing.assert_close(*results)
        assert results[0][0].eq(0).any()
        pipe.close()

    @each_schedule
    def test_layer_that_begins_to_draw(self, schedule: str) -> None:
        masks: list[Tensor] = []

        def masked(x: Tensor) -> Tensor:
            masks.append(torch.rand_like(x.detach()))
            return x * masks[-1]

        pipe = piped(nn.Sequential(*linears(), Call(lambda x: x)), [2, 2], chunks=2, checkpoint="always")
        pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule)
        pipe[3].function = masked
        for _ in range(3):
            masks.clear()
            pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule)
            assert len(masks) == 4
            assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 2


@each_schedule
@each_mode
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_hooks_of_parameters_fire_once_with_the_whole_gradient(schedule: str, mode: str, loss: str):
    pipe, weights = piped(linears(), [1, 2], chunks=3, checkpoint=mode), [rows().abs()]
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.clone())))
    pipe[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.clone())))
    loss_fn, how = LOSSES[loss]
    pipe.step(rows(), weights, loss_fn=loss_fn, schedule=schedule, **how)
    expected = gradients(pipe)
    assert len(seen) == len(expected) + 1
    torch.testing.assert_close(dict(seen), {**expected, "after": pipe[0].weight.grad})
    pipe.close()


class LearnedLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target)


class TestFailures:
    def failing(self, phase: str, at: int = 2) -> tuple[GPipe, Callable[[bool], None]]:
        """A pipe of three stages whose second one fails at a micro-batch, and the switch for it."""
        calls, on = [0], [True]

        def layer(x: Tensor) -> Tensor:
            calls[0] += 1
            if not on[0] or calls[0] != at + 1:
                return x
            if phase == "forward":
                raise ArithmeticError("no")
            return Raise.apply(x, ArithmeticError("no"))

        a, b, c = linears()
        model = nn.Sequential(a, b, Call(layer), c)
        return GPipe(model, [1, 2, 1], devices=["cpu"] * 3, chunks=4, checkpoint="never"), lambda to: on.insert(0, to)

    @each_schedule
    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_grad_that_was_none_is_none_again(self, schedule: str, phase: str) -> None:
        pipe, switch = self.failing(phase)
        with pytest.raises(ArithmeticError, match="no") as caught:
            pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, schedule=schedule)
        notes = " ".join(caught.value.__notes__)
        assert "in partition 1" in notes
        assert "micro-batch 2 of 4" in notes
        assert "zero_grad" not in notes
        assert all(p.grad is None for p in pipe.parameters())
        switch(False)
        pipe.step(rows(8), rows(8), loss_fn=F.mse_loss, schedule=schedule)
        F.mse_loss((model := linears())(rows(8)), rows(8)).backward()
        torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in model.parameters()])
        pipe.close()

    @each_schedule
    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_error_says_whether_older_gradients_may_be_mixed_with_new_ones(self, schedule: str, phase: str) -> None:
        pipe, _ = self.failing(phase)
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(ArithmeticError, match="no") as caught:
            pipe.step(rows(8), loss_fn=lambda y, _: y.sum(), reduction="sum", schedule=schedule)
        grown = int(pipe[-1].bias.grad[0]) // 2  # each of the two rows of a micro-batch adds 1
        told = re.findall(r"the \.grad of 6 .* zero_grad\(\)", "\n".join(caught.value.__notes__))
        assert bool(told) >= bool(grown)  # a backward may have only begun
        if phase == "forward" and schedule == "fill_drain":
            assert not told
        pipe.close()

    def test_fill_drain_leaves_gradients_as_they_are_when_a_forward_fails(self) -> None:
        pipe, _ = self.failing("forward")
        for parameter in pipe.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss = LearnedLoss()
        loss.scale.grad = torch.ones(())
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(rows(8), rows(8), loss_fn=loss, schedule="fill_drain")
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in [*pipe.parameters(), loss.scale])
        assert "zero_grad()" not in " ".join(caught.value.__notes__)

    @each_schedule
    def test_counted_losses_leave_older_gradients_as_they_are_whatever_fails(self, schedule: str) -> None:
        """They grow out of sight until they can be scaled."""
        pipe, _ = self.failing("backward")
        for parameter in pipe.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(rows(8), [rows(8).abs()], loss_fn=counted, schedule=schedule)
        assert "zero_grad()" not in " ".join(caught.value.__notes__)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in pipe.parameters())
        pipe.close()

    def test_all_workers_stop(self) -> None:
        pipe, _ = self.failing("forward", at=0)
        with pytest.raises(ArithmeticError):
            within(20, lambda: pipe.step(rows(8), rows(8), loss_fn=F.mse_loss))


class TestBadInput:
    pipe = staticmethod(lambda **options: piped(linears(), [1, 2], **{"chunks": 3, **options}))

    def test_unknown_schedule(self) -> None:
        with pytest.raises(ValueError, match=r"'gpipe'.*'fill_drain'.*'1f1b'.*'interleaved'.*'zero_bubble'.*'auto'"):
            self.pipe().step(rows(), rows(), loss_fn=F.mse_loss, schedule="gpipe")

    @pytest.mark.parametrize("schedule", [None, 1, ((),), [], b"1f1b"])
    def test_what_is_no_schedule(self, schedule: Any) -> None:
        with pytest.raises(TypeError, match=r"schedule must be a name such as '1f1b'.*; got"):
            self.pipe().step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule)

    @pytest.mark.parametrize("name", ["Interleaved", "looped_bfs", "interleaved_zero_bubble"])
    def test_interleaving_with_nothing_to_interleave_is_said_once(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        pipe, model = piped(linears(7), [1] * 7, chunks=5), linears(7)  # of no other test, since it is said once
        for _ in range(2):
            pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=name)
        assert [record.getMessage().count("devices=['cpu:0', 'cpu:1'] * 2") for record in caplog.records] == [1]
        for _ in range(2):
            F.mse_loss(model(rows()), rows()).backward()
        assert_same(pipe, model)

    def test_interleaving_says_nothing_where_it_does(self, caplog: pytest.LogCaptureFixture) -> None:
        pipe = GPipe(linears(4), [1] * 4, devices=["cpu:0", "cpu:1"] * 2, chunks=3)
        pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule="interleaved")
        with gpipe.inline():
            piped(linears(5), [1] * 5, chunks=3).step(rows(), rows(), loss_fn=F.mse_loss, schedule="interleaved")
        assert not caplog.records

    def test_placement_that_does_not_interleave(self) -> None:
        pipe = GPipe(linears(), [1, 1, 1], devices=["cpu:0", "cpu:1", "cpu:0"], chunks=3)
        with pytest.raises(ValueError, match="3 stages do not go evenly on 2 workers"):
            pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule="interleaved")
        blocks = GPipe(linears(4), [1] * 4, devices=["cpu:0", "cpu:0", "cpu:1", "cpu:1"], chunks=3)
        with pytest.raises(ValueError, match=r"in turn.*\[0, 0, 1, 1\]"):
            blocks.step(rows(), rows(), loss_fn=F.mse_loss, schedule="interleaved")
        for name in V_SHAPED:
            with pytest.raises(
                ValueError, match=rf"'{name}' goes down .* and up again.*'cpu:1', 'cpu:1', 'cpu:0'.*\[0, 0, 1, 1\]"
            ):
                blocks.step(rows(), rows(), loss_fn=F.mse_loss, schedule=name)
            with pytest.raises(ValueError, match=r"two stages on every worker.* got 3 stages"):
                pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=name)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("F0 F1 B0 B1", "1 stages, the pipe has 2"),
            ("F0 F1 B0 B1\nF0 F1 B0", "B1@1 is missing"),
            ("F0 F1 B0 B1\nB0 F0 F1 B1", "B0@1 comes before F0@1"),
            ("F0 F1 B0 B0 B1\nF0 F1 B0 B1", "B0@0 occurs twice"),
            ("F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2", "of micro-batch 2, but there are 2"),
            ("F0 B0 F1 B1\nF1 B1 F0 B0", "forever: .*@"),
        ],
    )
    def test_schedule_that_does_not_fit_is_refused_before_anything_runs(self, text: str, named: str) -> None:
        pipe, calls = self.pipe(chunks=2, checkpoint="never"), []
        pipe[0].register_forward_hook(lambda *_: calls.append(1))
        with pytest.raises(ValueError, match=named):
            pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=Schedule.parse(text))
        assert not calls

    @pytest.mark.parametrize("count", [2, 7])
    def test_target_with_another_number_of_microbatches(self, count: int) -> None:
        pipe = self.pipe(chunks=6)
        with pytest.raises(ValueError, match=rf"target has {count} rows .*, the input 6 rows"):
            pipe.step(rows(), rows(count), loss_fn=F.mse_loss)

    @pytest.mark.parametrize("target", [3, "labels", {"a": object()}])
    def test_target_that_cannot_be_cut(self, target: Any) -> None:
        with pytest.raises(TypeError):
            self.pipe().step(rows(), target, loss_fn=F.mse_loss)

    @pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
    def test_without_grad_mode(self, off: Callable[[], AbstractContextManager[Any]]) -> None:
        with off(), pytest.raises(RuntimeError, match="grad mode is off"):
            self.pipe().step(rows(), rows(), loss_fn=F.mse_loss)

    def test_pipe_without_layers(self) -> None:
        with pytest.raises(ValueError, match="at least one layer"):
            GPipe(nn.Sequential(), [], devices=[]).step(rows(), loss_fn=F.mse_loss)

    def test_reduction(self) -> None:
        with pytest.raises(ValueError, match="'mean' or 'sum'; got 'none'"):
            self.pipe().step(rows(), rows(), loss_fn=F.mse_loss, reduction="none")
        with pytest.raises(ValueError, match="normalizer goes with reduction='sum'"):
            self.pipe().step(rows(), rows(), loss_fn=F.mse_loss, normalizer=3)

    def test_afterwards_the_pipe_works(self) -> None:
        pipe, model = self.pipe(), linears()
        for options in ({"schedule": "no"}, {"reduction": "no"}):
            with pytest.raises(ValueError, match="'no'"):
                pipe.step(rows(), rows(), loss_fn=F.mse_loss, **options)
        pipe.step(rows(), rows(), loss_fn=F.mse_loss)
        F.mse_loss(model(rows()), rows()).backward()
        assert_same(pipe, model)


class Witnessed(nn.Module):
    """A layer whose output the backward needs, and which knows how many of these are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.alive: set[int] = set()
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x).exp()
        key = id(output.untyped_storage()), len(self.alive), torch.is_grad_enabled()
        self.alive.add(hash(key))
        weakref.finalize(output.untyped_storage(), self.alive.discard, hash(key))
        self.most = max(self.most, len(self.alive))
        return output - 1


class TestMemory:
    @pytest.mark.parametrize("where", [gpipe.inline, nullcontext])
    @pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
    def test_stage_holds_as_many_microbatches_as_its_program_says(
        self, where: Callable[[], AbstractContextManager[None]], schedule: str
    ) -> None:
        m, n = 12, 4
        layers = [Witnessed() for _ in range(n)]
        pipe = GPipe(nn.Sequential(*layers), [1] * n, devices=["cpu"] * n, chunks=m, checkpoint="never")
        x = torch.zeros(m, 8)
        with where():
            pipe.step(x, x, loss_fn=F.mse_loss, schedule=schedule)
        programs = SCHEDULES[schedule](m, range(n), 0)
        assert [layer.most for layer in layers] == [in_flight(program) for program in programs]
        assert [len(layer.alive) for layer in layers] == [0] * n
        pipe.close()

    def test_1f1b_keeps_a_share_of_what_fill_drain_keeps(self) -> None:
        """By storage, of the stage that keeps the most."""
        m, n = 32, 4
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2 * n)))
        pipe = GPipe(model, [2] * n, devices=["cpu"] * n, chunks=m, checkpoint="never")
        x = torch.randn(4 * m, 16)
        pipe.step(x, x, loss_fn=F.mse_loss)  # gradients are there from here on
        peaks = {}
        for schedule in ("fill_drain", "1f1b"):
            with gpipe.record(memory=True) as timeline:
                pipe.step(x, x, loss_fn=F.mse_loss, schedule=schedule)
            peaks[schedule] = max(timeline.peak_bytes.values())
        assert peaks["1f1b"] / peaks["fill_drain"] <= n / m + 0.05

    @pytest.mark.usefixtures("no_collector")
    @pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
    def test_nothing_waits_for_the_garbage_collector(self, schedule: str) -> None:
        """What a cell keeps is gone with its last action, and not once a collection happens to come by."""
        outputs: list[weakref.ref[Any]] = []
        pipe = piped(linears(), [1, 1, 1], chunks=6, checkpoint="never")
        for layer in pipe:
            layer.register_forward_hook(lambda _, args, output: outputs.append(weakref.ref(output.untyped_storage())))
        pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule)
        assert sum(each() is not None for each in outputs) == 0
        pipe.close()

    def test_outputs_and_their_gradients_go_with_their_microbatch(self) -> None:
        """A language model's are greater than all the rest."""
        alive: list[weakref.ref[Any]] = []

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            alive.append(weakref.ref(output.untyped_storage()))
            assert sum(each() is not None for each in alive) <= 2
            return F.mse_loss(output, target)

        pipe = piped(linears(), [1, 2], chunks=6, checkpoint="never")
        pipe.step(rows(), rows(), loss_fn=loss_fn)
        assert len(alive) == 6

    @pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.long)])
    @pytest.mark.parametrize("schedule", ALONE)
    def test_many_steps_leave_nothing_behind(self, schedule: str, steps: int) -> None:
        model = nn.Sequential(*linears()[:1], nn.BatchNorm1d(3, dtype=DOUBLE), nn.Dropout(0.1), *linears()[1:])
        pipe = piped(model, [2, 3], chunks=3, deferred_batch_norm=True)
        pipe[0].weight.register_hook(lambda gradient: gradient * 1.0)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.01, momentum=0.9)

        def train(steps: int) -> tuple[int, int]:
            for _ in range(steps):
                optimizer.zero_grad()
                pipe.step(rows(), [rows().abs()], loss_fn=counted, schedule=schedule)
                optimizer.step()
            return tensors(), threading.active_count()

        assert train(10) == train(steps)
        pipe.close()


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def test_checkpointing_follows_the_mode_and_the_microbatches_that_are():
    counts: dict[int, list[bool]] = {}

    def layer(x: Tensor) -> Tensor:
        counts.setdefault(int(x.detach()[0, 0]), []).append(gpipe.is_recomputing())
        return x * 1

    model = nn.Sequential(Call(layer), nn.Identity())
    for mode, recomputed in (("never", []), ("except_last", [0, 1]), ("always", [0, 1, 2])):
        counts.clear()
        pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=5, checkpoint=mode)
        x = torch.arange(3.0)[:, None].requires_grad_()
        pipe.step(x, loss_fn=lambda output, _: output.sum())
        assert [i for i in range(3) if counts[i] == [False, True]] == recomputed
        assert all(each[0] is False and len(each) <= 2 for each in counts.values())


def test_evaluation_trains_without_checkpoints():
    model = linears().eval()
    pipe = piped(model, [1, 2], chunks=3, checkpoint="always")
    pipe.step(rows(), rows(), loss_fn=F.mse_loss)
    F.mse_loss(model(rows()), rows()).backward()
    assert_same(pipe, model)


def test_programs_say_what_a_stage_holds():
    assert [in_flight(program) for program in one_forward_one_backward(32, 4)] == [4, 3, 2, 1]
    assert {in_flight(program) for program in fill_drain(32, 4)} == {32}

"""Training by steps or calls has the same results as the plain model, under every schedule.

Random models with random splits are compared with the model itself. If the plain model on the full mini-batch is no
oracle, because a layer mixes rows, the plain loop over micro-batches is used. With random layers, all
mode of the pipe computes from one seed must be the same.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree

import gpipe
from gpipe import GPipe, LossSum
from gpipe.schedule import SCHEDULES, Schedule, in_flight, v_placement

from ..layers import DOUBLE, MODES, Layer, assert_same, linears, piped, rows, running
from ..models import PARTS, Oracle, Recipe, assert_close, optimize, pipe_of, recipes
from ..schedules import CHOICES, V_SHAPED, some_schedule

STEADY = tuple(name for name, part in PARTS.items() if not part.draws)
OVERWRITING = ("linear", *(name for name in STEADY if PARTS[name].in_place or PARTS[name].output != "free"))
SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])


@dataclass(frozen=True)
class Way:
    """A way to train; all of them give the same gradients."""

    schedule: str
    """The schedule of a step; "call" for a call and the caller's backward."""
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

    def name(self, stages: int) -> str | None:
        """The schedule, another one if it wants an even number of stages, or the default if it cannot wait."""
        if self.loss == "whole":
            return waiting(self.schedule)
        return "zero_bubble" if self.schedule in V_SHAPED and stages % 2 else self.schedule

    def where(self) -> AbstractContextManager[None]:
        return running(self.inline)


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
"""The last layer's gradient has a different memory layout than the output."""

kinds_of_loss = st.sampled_from(["mean", "sum", "counted", "whole"])
ways = st.builds(
    Way, st.sampled_from(["call", *sorted(SCHEDULES)]), kinds_of_loss, st.integers(1, 3), st.booleans(), st.booleans()
)


def waiting(schedule: str) -> str | None:
    """Return the schedule if it can wait for a full-batch loss, else None."""
    return schedule if schedule in ("fill_drain", "looped_bfs", "auto", "search") else None


def weights_for(output: Any, seed: int) -> list[Tensor]:
    """Return the weight of every element of the output in the loss."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(t.shape, generator=generator, dtype=DOUBLE).to(t.dtype) for t in floats(output)]


def floats(output: Any) -> list[Tensor]:
    return [t for t in _pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def losses(output: Any, weights: list[Tensor]) -> Tensor:
    """One for each row."""
    each = [(t * w).flatten(1).sum(1) for t, w in zip(floats(output), weights, strict=True)]
    return torch.stack(each).sum(0)


def counted(output: Any, weights: list[Tensor]) -> LossSum:
    return LossSum(losses(output, weights).sum(), weights[0].sum())


def contrasted(output: Any, weights: list[Tensor]) -> Tensor:
    """Weight each row by comparing it with the others."""
    each = losses(output, weights)
    return each.softmax(0) @ each


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any]]] = {
    "mean": (lambda output, weights: losses(output, weights).mean(), {"reduction": "mean"}),
    "sum": (lambda output, weights: losses(output, weights).sum(), {"reduction": "sum", "normalizer": 7}),
    "counted": (counted, {}),
    "whole": (contrasted, {}),
    "random": (
        lambda output, weights: losses(output, [F.dropout(w, 0.3) for w in weights]).mean(),
        {"reduction": "mean"},
    ),
}


def whole(loss: str, output: Any, weights: list[Tensor]) -> Tensor:
    """Compute the loss of the mini-batch without a pipe."""
    found = LOSSES[loss][0](output, weights)
    if isinstance(found, LossSum):
        return found.total / found.count
    return found / LOSSES[loss][1].get("normalizer", 1)


def plainly(oracle: Oracle, x: Tensor, way: Way, recipe: Recipe) -> tuple[dict[str, Any], list[Tensor]] | None:
    """Return the results of a training step, and the weights of the loss; None if there is nothing to train."""
    if not recipe.accumulates:
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
    gradients = {name: None if gradient is None else gradient.clone() for name, gradient in parameters.items()}
    return {"loss": loss.detach(), "output": output, "input": leaf.grad, **gradients}


def stepped(pipe: GPipe, x: Tensor, weights: Any, way: Way, recipe: Recipe, **options: Any) -> dict[str, Any]:
    if not recipe.accumulates:
        pipe.zero_grad()
    leaf = x.clone().requires_grad_(recipe.input_needs_grad)
    loss_fn, how = LOSSES[way.loss]
    if way.schedule == "call":
        with way.where():
            output = pipe(leaf * 1)
            loss = whole(way.loss, output, weights)
            loss.backward()
        return left(pipe, loss, output, leaf)
    options = {"schedule": way.name(len(pipe.partitions)), **how, **options}
    with way.where():
        loss, output = pipe.step(leaf * 1, weights, loss_fn=loss_fn, return_outputs=True, **options)
    assert not any(t.requires_grad for t in [loss, *floats(output)])
    return left(pipe, loss, output, leaf)


@SLOW
@given(recipes(STEADY), ways)
def test_a_pipe_trains_as_its_model(recipe: Recipe, way: Way):
    model = recipe.model()
    with closing(pipe_of(recipe, model, devices=way.devices)) as pipe:
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


@SLOW
@given(recipes(OVERWRITING), ways)
def test_overwriting_layers_are_right_or_raise(recipe: Recipe, way: Way):
    recipe = replace(recipe, overwrites=True)
    x, model = recipe.batches()[0], recipe.model()
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
    expected = plainly(Oracle(recipe, plain), x, way, recipe)
    if expected is None:
        return
    with closing(pipe_of(recipe, model, devices=way.devices)) as pipe:
        try:
            found = stepped(pipe, x, expected[1], way, recipe)
        except RuntimeError as refusal:
            assert "inplace" in str(refusal) or "in place" in str(refusal)  # noqa: PT017
            return
    assert_close(found, expected[0], recipe)


def lived(recipe: Recipe, way: Way, checkpoint: Any = None) -> list[Any]:
    """Return the results of two training steps."""
    results: list[Any] = []
    with closing(pipe_of(recipe, recipe.model(), checkpoint, way.devices)) as pipe:
        with torch.no_grad():
            weights = [weights_for(pipe(x.clone()), recipe.seed) for x in recipe.batches()]
        torch.manual_seed(recipe.seed)
        for x, w in zip(recipe.batches(), weights, strict=True):
            results.append(stepped(pipe, x, w, way, recipe))
            optimize(pipe)
        return [*results, dict(pipe.state_dict())]


@settings(SLOW, max_examples=SLOW.max_examples // 2)
@given(recipes(), ways, st.sampled_from(MODES), st.sampled_from([("1f1b", "zero_bubble"), ("call", "call")]))
@example(NOT_CONTIGUOUS, Way("1f1b", "mean", 1, False, False), "never", ("1f1b", "zero_bubble"))
def test_split_backward_and_recomputation_are_exact(recipe: Recipe, way: Way, mode: str, both: tuple[str, str]):
    """They are bitwise equal, because the same operations run in the same order on any thread."""
    recipe = replace(recipe, training=True, input_needs_grad=True, checkpoint="always")
    expected = lived(recipe, replace(way, schedule=both[0]))
    found = lived(recipe, replace(way, schedule=both[1], inline=True), mode)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """Draw any schedule, its micro-batches, stages and checkpoints."""
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
        with running(inline):
            loss = pipe.step(x, target, loss_fn=F.mse_loss, schedule=schedule)
        expected = F.mse_loss(model(x), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(pipe, model)


def test_targets_get_no_gradient() -> None:
    pipe, target = piped(linears(), [1, 2], chunks=2), rows(grad=True)
    pipe.step(rows(), target, loss_fn=F.mse_loss)
    assert target.grad is None


@pytest.mark.parametrize("filled", [False, True])
def test_failed_step_reports_changed_gradients(filled: bool):
    calls = iter([1, 0])  # the second micro-batch fails, after the backward of the first
    with closing(piped(linears(), [1, 2], chunks=2, checkpoint="never")) as pipe:
        for parameter in pipe.parameters():
            parameter.grad = torch.ones_like(parameter) if filled else None
        pipe[2].register_forward_pre_hook(lambda _, args: args[0] * (1 // next(calls)))
        with pytest.raises(ZeroDivisionError) as caught:
            pipe.step(rows(), rows(), loss_fn=F.mse_loss)
    noted = [note for note in caught.value.__notes__ if "zero_grad()" in note]
    assert len(noted) == filled
    assert not filled or "the .grad of 6 parameters" in noted[0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("F0 F1 B0 B1", "1 stages, but the pipe has 2"),
        ("F0 F1 B0 B1\nF0 F1 B0", "stage 1 does F1 for micro-batch 1; expected F1"),
        ("F0 F1 B0 B1\nB0 F0 F1 B1", "stage 1 does B0 F0 for micro-batch 0"),
        ("F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2", "for micro-batch 2, but there are 2"),
        ("F0 B0 F1 B1\nF1 B1 F0 B0", "forever: .*@"),
    ],
)
def test_unsuitable_schedule_raises_before_running(text: str, named: str) -> None:
    pipe, calls = piped(linears(), [1, 2], chunks=2, checkpoint="never"), []
    pipe[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=named):
        pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=Schedule.parse(text))
    assert not calls


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_grad_mode_is_refused(off: Callable[[], AbstractContextManager[Any]]) -> None:
    with off(), pytest.raises(RuntimeError, match="grad mode is off"):
        piped(linears(), [1, 2], chunks=3).step(rows(), rows(), loss_fn=F.mse_loss)


def alive(s: Layer) -> int:
    return sum(not ref.expired() for ref in s.refs)


def witnessed(s: Layer, x: Tensor) -> Tensor:
    """Its output is needed by the backward; notes how many of these are alive at once."""
    output = s.m[0](x).exp()
    s.refs.append(StorageWeakRef(output.untyped_storage()))
    s.counts.append(alive(s))
    return output - 1


@pytest.mark.parametrize("where", [gpipe.inline, nullcontext])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stage_holds_micro_batches_of_its_program(
    where: Callable[[], AbstractContextManager[None]], schedule: str
) -> None:
    m, n = 12, 4
    layers = [Layer(witnessed, nn.Linear(8, 8), refs=[], counts=[]) for _ in range(n)]
    pipe = GPipe(nn.Sequential(*layers), [1] * n, devices=["cpu"] * n, chunks=m, checkpoint="never")
    x = torch.zeros(m, 8)
    with where():
        pipe.step(x, x, loss_fn=F.mse_loss, schedule=schedule)
    programs = SCHEDULES[schedule](m, range(n), 0)
    assert [max(layer.counts) for layer in layers] == [in_flight(program) for program in programs]
    assert [alive(layer) for layer in layers] == [0] * n
    pipe.close()

"""Tensors that share memory: in-place changes by a later stage, the loss or the caller are never lost.

Random stages return duplicates, views, detached tensors and their inputs, and modify them in place. The oracle is the
plain loop over micro-batches. A pipe may raise if it cannot repeat an operation, but is never wrong.
"""

import copy
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline
from gpipe.skip import Namespace

from ..layers import DOUBLE, MODES, Call, Layer, Pop, Stash, assert_same, each_mode, linears, piped, rows, squares

SCHEDULES = ("forward", "fill_drain", "1f1b", "zero_bubble")
WIDTH = 4


class Reversed(torch.autograd.Function):
    """A view with a custom gradient, as in gradient reversal layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * -0.5


Op = tuple[str, int]
"""An operation, and the index of its tensor, modulo the number of tensors."""

# From one tensor to others that join it on the way.
VIEWS = {
    "same": lambda t: [t],
    "alias": lambda t: [t.view_as(t)],
    "column": lambda t: [t[:, :1]],
    "columns": lambda t: [t[:, 1:]],
    "halves": lambda t: list(t.chunk(2, 1)),
    "split": lambda t: list(t.split(1, 1)),
    "select": lambda t: [t.select(1, 0)],
    "expand": lambda t: [t[:, :1].expand(-1, WIDTH)],
    "deep": lambda t: [t.unsqueeze(2)],
    "flipped": lambda t: [t.unsqueeze(1).transpose(1, 2)],
    "detach": lambda t: [t.detach()],
    "detached view": lambda t: [t.detach()[:, :1]],
    "reversed": lambda t: [t := Reversed.apply(t), t[:, :1]],
    "reversed parts": lambda t: [t := Reversed.apply(t[:, 1:]), *t.split(1, 1)],
    "bits": lambda t: [t.detach().view(torch.int64)],
    "bytes": lambda t: [t.detach().view(torch.uint8)],
    "constant": lambda t: [t.detach() * 2],
    "constant twice": lambda t: [t.detach() * 2] * 2,
    "constant and view": lambda t: [c := t.detach() * 2, c[:, :1]],
}

# In-place operations.
CHANGES = {
    "add": lambda t: t.add_(1),
    "scale": lambda t: t.mul_(3),
    "relu": lambda t: t.relu_() if t.is_floating_point() else t,
    "part": lambda t: t[:, :1].mul_(2),
    "rows": lambda t: t[:1].add_(t[:1].detach().clone()),
}

# Out-of-place operations.
MAPS = {"fresh": lambda t: t * 1.5, "square": lambda t: t * t, "identity": lambda t: t, "flat": lambda t: t.flatten(1)}


class WorkerSteps(nn.Module):
    """A layer that does one thing with a tuple of tensors."""

    def __init__(self, name: str, index: int) -> None:
        super().__init__()
        self.name, self.index = name, index
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=DOUBLE)) if name == "weighted" else None

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        k = self.index % len(value)
        t = value[k]
        if self.scale is not None:
            return (*value[:k], t * self.scale, *value[k + 1 :])
        if self.name in VIEWS:
            return (*value, *VIEWS[self.name](t))
        if self.name in CHANGES:
            CHANGES[self.name](t)
            return value
        if self.name in MAPS:
            return (*value[:k], MAPS[self.name](t), *value[k + 1 :])
        return {"drop": value[:k] + value[k + 1 :] or value, "turn": value[1:] + value[:1]}[self.name]


def stash(index: int) -> nn.Module:
    """Stashes one of the tensors on the way."""
    return Stash(lambda value: value[index % len(value)], lambda value: value)


def pop() -> nn.Module:
    return Pop(lambda value, skip: (*value, skip))


@dataclass(frozen=True)
class Recipe:
    """A model, how to run it, and in-place operations of the caller on the output."""

    entrance: tuple[Op, ...]
    stages: tuple[tuple[Op, ...], ...]
    end: tuple[Op, ...]
    skip: tuple[int, int, int] | None
    mode: str
    schedule: str
    chunks: int
    rows: int
    grad: bool
    threads: bool

    def partitions(self) -> list[list[nn.Module]]:
        partitions: list[list[nn.Module]] = [[WorkerSteps("weighted", 0)] if self.grad else [] for _ in self.stages]
        for layers, ops in zip(partitions, self.stages, strict=True):
            layers += [WorkerSteps(*op) for op in ops] or [nn.Identity()]
        if self.skip is not None:
            start, length, index = self.skip
            a = start % len(partitions)
            b = min(len(partitions) - 1, a + length)
            space = Namespace()
            partitions[a].append(stash(index).isolate(space))
            partitions[b].insert(0 if b > a else len(partitions[b]), pop().isolate(space))
        return partitions

    def plain(self) -> nn.Sequential:
        return nn.Sequential(*(layer for layers in self.partitions() for layer in layers))

    def x(self) -> Tensor:
        return rows(self.rows, WIDTH, grad=self.grad)


NAMES = ("weighted", "weighted", *VIEWS, *CHANGES, *CHANGES, *MAPS, "drop", "turn")


def ops(names: Sequence[str], largest: int) -> st.SearchStrategy[tuple[Op, ...]]:
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 3)), max_size=largest).map(tuple)


def recipes() -> st.SearchStrategy[Recipe]:
    return st.builds(
        Recipe,
        entrance=ops([*VIEWS, "turn"], 2),
        stages=st.lists(ops(NAMES, 3), min_size=1, max_size=4).map(tuple),
        end=ops([name for name in (*CHANGES, *CHANGES, *MAPS, *VIEWS) if name != "rows"], 3),
        skip=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
        mode=st.sampled_from(MODES),
        schedule=st.sampled_from(SCHEDULES),
        chunks=st.integers(1, 3),
        rows=st.integers(3, 5),
        grad=st.sampled_from([True, True, False]),
        threads=st.sampled_from([False, False, False, True]),
    )


def loss(value: Any, end: Sequence[Op]) -> Tensor:
    """Apply in-place operations to an output, and weight every element differently."""
    for op in end:
        value = WorkerSteps(*op)(value)
    total = torch.zeros((), dtype=DOUBLE)
    for k, t in enumerate(value):
        t = t if t.is_floating_point() else (t % 7).to(DOUBLE)
        weights = torch.arange(1, t[0].numel() + 1, dtype=DOUBLE).reshape(t[0].shape).sin() + 0.1 * k + 1
        total = total + (t * weights).sum()
    return total


def given_to(recipe: Recipe, x: Tensor) -> tuple[Tensor, ...]:
    """Return the input as a non-leaf, so that a layer may modify it in place."""
    value: tuple[Tensor, ...] = (x * 1,)
    for op in recipe.entrance:
        value = WorkerSteps(*op)(value)
    return value


def expected(recipe: Recipe) -> dict[str, Any]:
    """Return the results of the plain loop."""
    model, x = recipe.plain(), recipe.x()
    found = torch.zeros((), dtype=DOUBLE)
    for part in x.chunk(recipe.chunks):
        one = loss(model(given_to(recipe, part)), recipe.end)
        if one.requires_grad:
            one.backward()
        found = found + one.detach()
    return left(found, x, model)


def computed(recipe: Recipe, pipe: GPipe, x: Tensor) -> dict[str, Any]:
    value = given_to(recipe, x)
    if recipe.schedule == "forward" or not recipe.grad:
        found = loss(pipe(value), recipe.end)
        if found.requires_grad:
            found.backward()
    else:
        found = pipe.step(value, loss_fn=lambda y, _: loss(y, recipe.end), reduction="sum", schedule=recipe.schedule)
    return left(found.detach(), x, pipe)


def left(found: Tensor, x: Tensor, model: nn.Module) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": found, "input": x.grad, **gradients}


REFUSALS = (
    "shares its memory",  # changed by a later stage, while sent elsewhere as well
    "shares memory",
    "was changed in place after their forward",
    "modified by an inplace operation",  # torch: saved, and changed
    "modified inplace",  # torch: one of several views
    "being used in an in-place operation",
    "does not require grad",
    "single memory location",  # torch: in an expanded tensor
    "changed their input in place on this micro-batch but not on the ones before",
    "cannot be cut",
)


def known(error: Exception) -> str:
    """Return the expected message that the error contains, or re-raise the error."""
    for text in REFUSALS:
        if text in str(error):
            return text
    raise error


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(recipes())
def test_aliases_are_those_of_the_plain_model(recipe: Recipe):
    try:
        if may_be_separate(recipe):
            recipe = replace(recipe, end=())
        wanted = expected(recipe)
    except (RuntimeError, IndexError):
        event("refused by torch in the plain model")
        return
    try:
        found = run(recipe)
    except (RuntimeError, ValueError) as error:
        event(f"refused: {known(error)}")
        return
    event("equal")
    torch.testing.assert_close(found, wanted, equal_nan=True)


def may_be_separate(recipe: Recipe) -> bool:
    """Return whether outputs without grad, which torch cannot protect, shared memory with each other."""
    if recipe.schedule != "forward" and recipe.grad:
        return False  # loss_fn must not change them
    output = recipe.plain()(given_to(recipe, recipe.x()))
    own = [tensor.untyped_storage().data_ptr() for tensor in output]
    return any(own.count(key) > 1 and not t.requires_grad for key, t in zip(own, output, strict=True))


EXAMPLES = {
    "a duplicate": ("same",),
    "a view": ("column",),
    "what is detached": ("detach",),
    "what a view is of": ("columns", "turn"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_mode
@pytest.mark.parametrize("name", EXAMPLES)
def test_changing_shared_memory_raises(name: str, mode: str, schedule: str):
    """The change is in the next stage, a later one, or the loss. A reader of both gets the plain model's values."""
    pair, change = tuple((op, 0) for op in EXAMPLES[name]), (("scale", 1),)
    cases = [((pair, change), ()), ((pair, (), change), ()), (((), pair), (("scale", 0),))]
    for stages, end in cases:
        with pytest.raises(RuntimeError, match=r"shares its memory|modified inplace"):
            run(Recipe((), stages, end, None, mode, schedule, 2, 5, True, False))
    reads = Recipe((), (pair, (("square", 1),)), (), None, mode, schedule, 2, 5, True, True)
    torch.testing.assert_close(run(reads), expected(reads))


def run(recipe: Recipe) -> dict[str, Any]:
    """Return the results of a pipe."""
    balance = [len(layers) for layers in recipe.partitions()]
    pipe = piped(recipe.plain(), balance, chunks=recipe.chunks, checkpoint=recipe.mode)
    with closing(pipe), nullcontext() if recipe.threads else inline():
        return computed(recipe, pipe, recipe.x())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_change_is_refused_where_torch_counts_none(mode: Any):
    layers = [Call(lambda x: (x, x[:, :1])), Call(lambda v: (v[0].mul_(2), v[1]))]
    pipe = piped(nn.Sequential(*linears(1), *layers), [2, 1], chunks=2)
    with inline(), mode(), pytest.raises(RuntimeError, match="shares its memory"):
        pipe(rows())
    with inline(), mode():
        whole, part = piped(nn.Sequential(*linears(1), layers[0], nn.Identity()), [2, 1], chunks=2)(rows())
        own = [Call(lambda x: (x, x[:, :1], -x)), Call(lambda v: v[2].mul_(2))]
        found = piped(nn.Sequential(*linears(1), *own), [2, 1], chunks=2)(rows())
    torch.testing.assert_close(part, whole[:, :1])
    torch.testing.assert_close(found, -2 * whole)


@each_mode
@pytest.mark.parametrize("between", [nn.Identity(), nn.Flatten()])
@pytest.mark.parametrize("ends", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_caller_s_input_is_not_overwritten(chunks: int, ends: Any, between: nn.Module, mode: str):
    """Neither by the first stage, nor by one that gets it from there, nor through the output."""
    change = nn.LeakyReLU(0.5, inplace=True)
    for layers, balance in (([change], [1]), ([between, change], [1, 1]), ([between], [1])):
        x = rows()
        with inline(), ends():
            piped(nn.Sequential(*layers), balance, chunks=chunks, checkpoint=mode)(x).mul_(2)
        assert torch.equal(x, rows())


@each_mode
def test_later_stage_does_not_overwrite_saved_input(mode: str):
    """The second stage returns its input, and the third modifies it."""
    model = nn.Sequential(*linears(1), nn.Identity(), nn.LeakyReLU(0.5, inplace=True))
    pipe = piped(copy.deepcopy(model), [1, 1, 1], chunks=3, checkpoint=mode)
    with inline():
        pipe(rows()).sum().backward()
    model(rows()).sum().backward()
    assert_same(pipe, model)


@each_mode
def test_skip_sharing_memory_past_a_stage(mode: str):
    """A change raises; an unchanged skip is fine."""
    for change, refused in ((CHANGES["scale"], True), (nn.Identity(), False)):
        layers = [*linears(1, WIDTH), Call(lambda x: (x,)), stash(0), Call(lambda v: v[0].view_as(v[0]))]
        layers += [Call(change), Call(lambda x: (x,)), pop(), Call(sum)]
        pipe = GPipe(nn.Sequential(*layers), [4, 1, 3], devices=["cpu"] * 3, chunks=2, checkpoint=mode)
        with inline(), pytest.raises(RuntimeError, match="shares its memory") if refused else nullcontext():
            pipe(rows(4, WIDTH)).sum().backward()


@each_mode
@pytest.mark.parametrize("kind", ["_parameters", "_buffers", "__dict__"])
def test_returned_state_is_not_overwritten(kind: str, mode: str):
    state = torch.ones(1, WIDTH, dtype=DOUBLE)
    gives = Layer(lambda s, x: (x, s.state[:, :2]))
    getattr(gives, kind)["state"] = nn.Parameter(state) if kind == "_parameters" else state
    layers = [gives, Call(lambda v: (v[0], v[1].mul_(2))), Call(lambda v: v[0] * v[1].sum())]
    pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint=mode)
    with inline(), pytest.raises(RuntimeError, match="shares its memory"):
        pipe(rows(4, WIDTH))


@pytest.mark.parametrize("where", ["stage", "end"])
def test_changing_memory_shared_unknown_to_autograd_raises(where: str):
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    layers = [*linears(1, WIDTH), Call(lambda x: (x, Hidden.apply(x)))]
    layers += [Call(lambda v: (v[0].mul_(2), v[1]))] if where == "stage" else [nn.Identity()]
    pipe = GPipe(nn.Sequential(*layers), [2, 1], devices=["cpu"] * 2)
    with inline(), pytest.raises(RuntimeError, match=r"shares its memory|modified inplace"):
        pipe(rows(4, WIDTH))[0].mul_(2)


@each_mode
@pytest.mark.parametrize("balance", [[2, 1], [1, 2], [1, 1, 1]])
def test_hooks_of_views_are_called(mode: str, balance: list[int]):
    """Gradients pass through a view with a hook, rather than directly to its base."""

    def heard(x: Tensor) -> tuple[Tensor, Tensor]:
        view = (x * 2).view_as(x)
        if view.requires_grad:
            view.register_hook(lambda gradient: gradient * 0.5 + 1)
        return view, view[:, :1]

    model = nn.Sequential(linears(1)[0], Call(heard), Call(lambda value: value[0].sin() * value[1]))
    with closing(piped(model, balance, chunks=3, checkpoint=mode)) as pipe:
        pipe(rows()).sum().backward()
        for part in rows().chunk(3):
            model(part).sum().backward()
        assert_same(pipe, model)


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_mode
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("place", [0, 1])
def test_layer_in_place_on_later_micro_batches_only(place: int, grad: bool, mode: str, schedule: str):
    def sometimes(value: Any) -> Any:
        x, y = value
        return (x.mul_(2), y) if bool(x[0, 0].detach() > 0) else value

    layers = [nn.Identity(), Call(sum), linears(1)[0]]
    layers.insert(place, Call(sometimes))
    model = nn.Sequential(*layers)
    numbers = torch.tensor([-1.0, -2, 3, 4], dtype=DOUBLE)[:, None].repeat(1, 3)
    x = numbers.requires_grad_(grad) * 1
    pipe = piped(model, [1, 3], chunks=4, checkpoint=mode)
    with closing(pipe), pytest.raises(RuntimeError, match="in place on this micro-batch but not on the first"):
        pipe((x, x * 1)) if schedule == "forward" else pipe.step(
            (x, x * 1), loss_fn=squares, reduction="mean", schedule=schedule
        )


@each_mode
def test_layer_in_place_on_first_micro_batch(mode: str) -> None:
    sometimes = Call(lambda x: x.mul_(2) if bool(x[0, 0].detach() > 0) else x)
    x = torch.tensor([1.0, -2, 3], dtype=DOUBLE)[:, None].repeat(1, 3)
    with closing(piped(nn.Sequential(nn.Identity(), sometimes), [1, 1], chunks=3, checkpoint=mode)) as pipe:
        torch.testing.assert_close(pipe(x), torch.where(x > 0, 2 * x, x))

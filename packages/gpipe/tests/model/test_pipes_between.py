"""A pipe that a model calls in its forward, between its blocks or in one, is a part of the model as any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import gpipe
from gpipe import GPipe
from gpipe._torch import function_modes, pop_function_mode, push_function_mode
from gpipe.model._between import Between

from ..layers import DOUBLE, MODES, rows

WIDTH = 3
PLACES = ("first", "between", "last", "in a block")
WAYS = {"threads": nullcontext, "inline": gpipe.inline}
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "device": partial(torch.device, "cpu"),
    "no_grad": torch.no_grad,
}


class Case(NamedTuple):
    """A model that calls a pipe.

    Attributes:
        places: where it calls the pipe.
        around: what is entered around its forward.
        own_forward: whether the pipe is one of a model with its own forward.
        is_registered: whether it is a module of the model.
        dropout: the share of values that each block drops.
        modes: the checkpoint modes of the model's pipe, and of the pipe inside it.
        step: whether the loss is computed per micro-batch.
        way: whether the calling thread takes the steps of all stages.
    """

    places: frozenset[str]
    around: str = "nothing"
    own_forward: bool = True
    is_registered: bool = True
    dropout: float = 0.0
    modes: tuple[str, str] = ("never", "always")
    step: bool = False
    way: str = "threads"


class Block(nn.Module):
    def __init__(self, dropout: float, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.dropout, self.inner = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE), dropout, inner

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        return F.dropout(self.linear(x), self.dropout).tanh()


class Row(nn.Module):
    """Runs its blocks in sequence, and stores the input of the first."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for block in self.layers:
            x = block(x)
        return x + first


class Around(nn.Module):
    """Calls ``inner`` in some places. A list hides it from the modules of the model."""

    def __init__(self, inner: nn.Module, case: Case) -> None:
        super().__init__()
        inside = Hidden(inner) if "in a block" in case.places else None
        self.layers = nn.ModuleList([Block(case.dropout, inside), Block(case.dropout)])
        self.case, self.inner = case, inner if case.is_registered else Hidden(inner)

    def forward(self, x: Tensor) -> Tensor:
        places = self.case.places
        with AROUND[self.case.around]():
            x = x * 2
            x = x + self.inner(x) if "first" in places else x
            x = skip = self.layers[0](x)
            x = x + self.inner(x) if "between" in places else x
            x = self.layers[1](x)
            return x + self.inner(x + skip) if "last" in places else x + skip


class Hidden(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x)


def inner_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    blocks = Block(case.dropout), Block(case.dropout)
    return Row(*blocks) if case.own_forward else nn.Sequential(*blocks)


def around(inner: nn.Module, case: Case) -> Around:
    torch.manual_seed(1)
    return Around(inner, case)


def trained(module: Any, x: Tensor, parts: list[nn.Module], *, step: bool) -> list[Tensor]:
    """Return the loss, and the gradients of ``parts``."""
    for part in parts:
        part.zero_grad()
    torch.manual_seed(2)
    if step and isinstance(module, GPipe):
        loss = module.step(x, loss_fn=lambda output: output.square().sum(), reduction="sum")
    else:
        loss = module(x).square().sum()
        if loss.requires_grad:
            loss.backward()
    return [
        loss.detach(),
        *[parameter.grad for part in parts for parameter in part.parameters() if parameter.grad is not None],
    ]


def by_pipes(case: Case, x: Tensor) -> list[Tensor]:
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 2}
    layers = inner_of(case)
    with closing(GPipe(layers, [1, 1], checkpoint=case.modes[1], **options)) as inner:
        model = around(inner, case)
        with (
            closing(GPipe(model, [1, 1], checkpoint=case.modes[0], blocks="layers", **options)) as pipe,
            WAYS[case.way](),
        ):
            found = [trained(pipe, x, [layers, model], step=case.step) for _ in range(2)]
    # Stages call the inner pipe in any order of their micro-batches, which affects sums of more than two gradients.
    by_stages = "in a block" in case.places or (case.step and "last" in case.places)
    exact = {} if by_stages and len(case.places) > 1 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[1], found[0], **exact)
    return found[0]


def cases(**strategies: Any) -> st.SearchStrategy[Case]:
    free = {
        "places": st.frozensets(st.sampled_from(PLACES), min_size=1),
        "around": st.sampled_from(["nothing", "device"]),
        "own_forward": st.booleans(),
        "is_registered": st.booleans(),
        "dropout": st.just(0.0),
        "modes": st.tuples(*[st.sampled_from(MODES)] * 2),
        "step": st.booleans(),
        "way": st.sampled_from([*WAYS]),
    }
    return st.builds(Case, **{**free, **strategies}).map(_recomputable)


def _recomputable(case: Case) -> Case:
    """A block that calls a pipe cannot be recomputed."""
    return case._replace(modes=("never", case.modes[1])) if "in a block" in case.places else case


@settings(max_examples=20)
@given(cases())
@example(Case(frozenset({"between"})))
@example(Case(frozenset({"between"}), own_forward=False, is_registered=False, step=True))
@example(Case(frozenset({"in a block"}), around="device", is_registered=False))
@example(Case(frozenset({"first", "last"}), around="device", way="inline"))
def test_model_calling_pipe_trains_like_plain(case: Case) -> None:
    inner, x = inner_of(case), rows(5)
    plain = around(inner, case)
    torch.testing.assert_close(by_pipes(case, x), trained(plain, x, [inner, plain], step=case.step))


@settings(max_examples=10)
@given(
    cases(dropout=st.just(0.5), places=st.frozensets(st.sampled_from(["first", "between", "in a block"]), min_size=1))
)
@example(Case(frozenset({"between"}), dropout=0.5))
def test_its_random_numbers_do_not_depend_on_recomputations(case: Case) -> None:
    x = rows(5)
    expected = by_pipes(case._replace(modes=("never", "never")), x)
    torch.testing.assert_close(by_pipes(case, x), expected)


@pytest.mark.parametrize("own_forward", [False, True])
def test_it_may_be_without_gradients(own_forward: bool) -> None:
    case = Case(frozenset({"between"}), around="no_grad", own_forward=own_forward)
    inner, x = inner_of(case), rows(4)
    plain = around(inner, case)
    torch.testing.assert_close(by_pipes(case, x), trained(plain, x, [inner, plain], step=False))


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_its_own_steps_between_blocks_are_refused(method: str, own_forward: bool) -> None:
    inner = GPipe(inner_of(Case(frozenset(), own_forward=own_forward)), [1, 1], devices=["cpu", "cpu"])

    def stepped(x: Tensor) -> Tensor:
        getattr(inner, method)(x.detach(), loss_fn=lambda output: output.sum(), reduction="sum")
        return x

    class Stepping(Row):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](stepped(self.layers[0](x)))

    pipe = GPipe(Stepping(Block(0.0), Block(0.0)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    with pytest.raises(RuntimeError, match=r"another pipe can only be called as a module, pipe\(x\)"):
        pipe(rows(4))
    assert not any(parameter.grad is not None for parameter in inner.parameters())


class Looks:
    is_of_forward = True
    device = torch.device("cpu")

    def operate(self, function: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError("the mode is off")

    def read(self, tensor: Tensor) -> None: ...


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@given(st.integers(0, 2), st.integers(0, 2), st.integers(-2, 2))
def test_disabled_mode_returns_to_its_place(around: int, inside: int, change: int) -> None:
    """More modes may be entered or exited in between, for example by ``torch.set_default_device``."""
    before = [*function_modes()]
    between, outer, inner = Between(Looks()), [Mode() for _ in range(around)], [Mode() for _ in range(inside)]
    others = [Mode() for _ in range(change)]
    try:
        for mode in outer:
            push_function_mode(mode)
        between.__enter__()
        for mode in inner:
            push_function_mode(mode)
        with between.off():
            assert [*function_modes()] == [*reversed([*outer, *inner]), *before]
            torch.ones(()) + 1
            for mode in others:
                push_function_mode(mode)
            for _ in range(min(-change, inside)):
                pop_function_mode()
        left = inner[: max(inside + min(change, 0), 0)]
        assert [*function_modes()] == [*reversed([*outer, between, *left, *others]), *before]
        between.leave()
        assert between not in function_modes()
    finally:
        while [*function_modes()] != before:
            pop_function_mode()

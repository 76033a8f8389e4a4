"""A pipe follows later changes of its model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import Layer

WIDTH, ROWS = 4, 6
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def block() -> Layer:
    return Layer(lambda s, hidden, shift: (s.linear(hidden) + shift).tanh(), linear=nn.Linear(WIDTH, WIDTH))


class Asking(nn.Module):
    """Between all of its parts it makes a number in the dtype of one of them: a third, which has others in each."""

    def __init__(self, asked: Callable[[Asking, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.middle = nn.LayerNorm(WIDTH)
        self.others = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.ones(WIDTH))
        self.asked = asked

    def third(self, hidden: Tensor) -> Tensor:
        return torch.full(hidden.shape, 1 / 3, dtype=self.asked(self, hidden).dtype).to(hidden.dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            hidden = block(hidden, self.third(hidden))
        hidden = self.middle(hidden)
        for other in self.others:
            hidden = other(hidden, self.third(hidden))
        return self.head(hidden * self.extra + self.third(hidden) + self.mean)


ASKED: dict[str, Callable[[Asking, Tensor], Tensor]] = {
    "first parameter": lambda model, _: next(model.parameters()),
    "own parameter": lambda model, _: model.extra,
    "own buffer": lambda model, _: model.mean,
    "start": lambda model, _: model.embed.weight,
    "first blocks": lambda model, _: model.blocks[1].linear.weight,
    "between": lambda model, _: model.middle.weight,
    "later blocks": lambda model, _: next(model.others.parameters()),
    "end": lambda model, _: model.head.weight,
    "what goes on": lambda model, hidden: hidden,
}


@given(
    st.sampled_from(sorted(ASKED)),
    st.lists(st.tuples(st.sampled_from(["model", "pipe", "blocks", "head"]), st.sampled_from(DTYPES)), max_size=3),
)
def test_changing_dtype_of_model_or_part(asked: str, changes: list[tuple[str, torch.dtype]]) -> None:
    """The dtype is set on model or pipe, repeatedly, and the forward reads it from various places."""
    torch.manual_seed(0)
    model = Asking(ASKED[asked])
    plain = copy.deepcopy(model)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    x = torch.randn(ROWS, 2)
    for what, dtype in changes:
        whole = what in ("model", "pipe")
        (pipe if what == "pipe" else model if whole else getattr(model, what)).to(dtype)
        (plain if whole else getattr(plain, what)).to(dtype)
        try:
            expected = plain(x)
        except RuntimeError:  # parts of several dtypes, which the model itself cannot combine
            break
        # CPU kernels may sum the rows of a micro-batch in a different order than the full batch.
        torch.testing.assert_close(pipe(x), expected)
    pipe.close()


PLACES: dict[str, Callable[[Asking], nn.Module]] = {
    "model": lambda model: model,
    "start": lambda model: model.embed,
    "a block": lambda model: model.blocks[1],
    "in a block": lambda model: model.others[0].linear,
    "between": lambda model: model.middle,
    "end": lambda model: model.head,
}


@given(
    st.sampled_from(sorted(PLACES)),
    st.lists(st.one_of(st.floats(-2, 2), st.booleans()), min_size=1, max_size=3),
    st.booleans(),
)
def test_attributes_and_modes_of_any_module(place: str, changes: list[float | bool], copied: bool) -> None:
    """A number or the mode changes, and various parts of the forward read it."""
    where = PLACES[place]

    def asked(model: Asking, hidden: Tensor) -> Tensor:
        module = where(model)
        return torch.full((), float(module.factor) + module.training, dtype=torch.float64)

    class Scaling(Asking):
        def third(self, hidden: Tensor) -> Tensor:
            return self.asked(self, hidden).expand(hidden.shape)

    torch.manual_seed(0)
    model = Scaling(asked).double()
    where(model).factor = 1.0
    plain = copy.deepcopy(model)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    if copied:
        pipe = copy.deepcopy(pipe)
        model = pipe[:]
    x = torch.randn(ROWS, 2, dtype=torch.float64)
    for change in changes:
        for each in (model, plain):
            if isinstance(change, bool):
                where(each).train(change)
            else:
                where(each).factor = change
        torch.testing.assert_close(pipe(x), plain(x))
    pipe.close()


def test_the_pipe_tells_the_model_its_mode() -> None:
    model = Asking(ASKED["start"]).eval()
    model.middle.train = lambda mode: nn.Module.train(model.middle, False)  # as frozen norms
    pipe = GPipe(model, devices=["cpu"] * 2)
    for mode in (True, False):
        assert pipe.train(mode) is pipe
        assert {module.training for module in model.modules() if module is not model.middle} == {mode}
        assert not model.middle.training


class Frozen(Asking):
    """Its train() keeps some modules in evaluation mode, in the model, its block, or both."""

    frozen: tuple[str, ...] = ()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for name in self.frozen:
            self.get_submodule(name).eval()
        return self


class FrozenBlocks(nn.ModuleList):
    def train(self, mode: bool = True) -> FrozenBlocks:
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize("which", ["pipe", "model", "around"])
@pytest.mark.parametrize(
    ("frozen", "part", "copied"),
    [((), "blocks", False), (("embed", "blocks.1", "middle"), None, True), (("head", "blocks"), "others", False)],
)
def test_custom_train_method_determines_modes(
    frozen: tuple[str, ...], part: str | None, copied: bool, which: str
) -> None:
    model = Frozen(lambda model, _: model.extra)
    model.frozen = frozen
    for name, module in model.named_modules():
        if name.endswith(("linear", "middle", "embed", "head")):
            module.register_forward_hook(lambda module, _, output: output + module.training)
    if part is not None:
        setattr(model, part, FrozenBlocks(getattr(model, part)))
    plain, x = copy.deepcopy(model), torch.randn(ROWS, 2)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    if copied:
        pipe = copy.deepcopy(pipe)
        model = pipe[:]
    objects = {"pipe": pipe, "model": model, "around": nn.Sequential(pipe)}
    for mode in (False, True):
        objects[which].train(mode)
        plain.train(mode)
        torch.testing.assert_close(pipe(x), plain(x))
        assert [each.training for each in pipe.modules()] == [each.training for each in plain.modules()]
    pipe.close()

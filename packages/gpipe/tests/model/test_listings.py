"""A pipe of a model has the model's own names, in the model's own order."""

import copy
import pickle
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import gradients
from .trunks import Model, batch, models

LISTINGS = ("named_parameters", "named_buffers", "named_modules", "named_children")
EVERY = {"remove_duplicate": False}


class Jumbled(Model):
    """Registered in a different order than called, with tied weights and its own buffers."""

    def __init__(self, *, tied: bool = False, **options: Any) -> None:
        super().__init__(**options)
        for name in ("body", "embed"):
            self._modules[name] = self._modules.pop(name)
        self.register_buffer("gain", torch.ones(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)
        if tied:
            self.body.blocks[-1].linear.weight = self.body.blocks[0].linear.weight

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        return super().forward(x * self.gain + self.hidden, mask, labels)


def listed(module: nn.Module) -> dict[str, list[Any]]:
    """The names of everything in ``module``, in order, with the tensors and modules themselves."""
    found = {listing: [each for each in getattr(module, listing)() if each[0]] for listing in LISTINGS}
    for listing in LISTINGS[:2]:
        found[f"{listing} of all"] = list(getattr(module, listing)(**EVERY))
    return found | {"state_dict": [(name, t.data_ptr()) for name, t in module.state_dict().items()]}


def expect_listed(found: nn.Module, expected: nn.Module) -> None:
    mine, others = listed(found), listed(expected)
    for listing, entries in others.items():
        assert [name for name, _ in mine[listing]] == [name for name, _ in entries]
        assert all(a is b or a == b for (_, a), (_, b) in zip(mine[listing], entries, strict=True))


@settings(max_examples=settings.default.max_examples // 2)
@given(models(), st.booleans(), st.data())
def test_names_and_order_are_those_of_the_model(problem: tuple[dict[str, Any], Any], tied: bool, data: st.DataObject):
    model = Jumbled(**problem[0], tied=tied).double()
    with closing(GPipe(model, devices=["cpu"] * data.draw(st.integers(1, 3)))) as pipe:
        expect_listed(pipe, model)
        with closing(GPipe(pipe[:], devices=["cpu"])) as again:
            expect_listed(again, model)
        assert list(nn.ModuleDict({"a": pipe}).state_dict()) == [f"a.{name}" for name in model.state_dict()]


class Averaging(nn.Module):
    """Running means in the first segment, in a block, in the model itself, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.first = nn.BatchNorm1d(4)
        self.embed = nn.Linear(2, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.last = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(x.detach().mean(0))
        x = self.first(self.embed(x - self.mean.to(x.dtype)))
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("change", [torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("through", ["pipe", "around"])
def test_buffers_stay_those_of_the_model(change: torch.dtype, through: str):
    torch.manual_seed(0)
    model = Averaging()
    x = torch.rand(6, 2)
    plain = copy.deepcopy(model).to(change)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=3, checkpoint="never")
    (pipe if through == "pipe" else nn.ModuleDict({"pipe": pipe})).to(change)
    expect_listed(pipe, model)
    x = x.to(change)
    for part in x.chunk(3):
        plain(part).float().square().mean().div(3).backward()
    pipe.step(x, loss_fn=lambda output: output.float().square().mean(), reduction="mean")
    expect_listed(pipe, model)
    assert {str(t.dtype) for t in model.state_dict().values() if t.is_floating_point()} == {str(change)}
    assert all(tensor.any() for name, tensor in model.named_buffers())
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_the_pipe_and_the_model_have_one_mode():
    model = Model(others=2, dropout=0.5).double()
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    model.eval()
    assert not pipe.training
    torch.testing.assert_close(pipe(**batch())["logits"], model(**batch())["logits"])
    pipe.train()
    assert all(module.training for module in (*model.modules(), *pipe.modules()))
    model.train(False)
    pipe.step(**batch(), loss_fn=lambda output: output["logits"].square().mean())
    found = gradients(model)
    model.zero_grad()
    model(**batch())["logits"].square().mean().backward()
    torch.testing.assert_close(found, gradients(model))


class Stateful(Model):
    """Has extra state that is saved, moved and loaded, and an alias of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.table = 0, torch.zeros(2)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.epoch)

    def set_extra_state(self, state: Tensor) -> None:
        self.epoch = int(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "top.weight" in state_dict:
            state_dict[prefix + "head.weight"] = state_dict.pop(prefix + "top.weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        return {name.replace("head.weight", "top.weight"): value for name, value in found.items()}

    def _apply(self, fn: Any, recurse: bool = True) -> "Stateful":
        super()._apply(fn, recurse)
        self.table = fn(self.table)
        return self


@pytest.mark.parametrize("way", ["new", "copied", "pickled"])
def test_pipe_uses_state_dict_methods_of_model(way: str):
    model, plain, calls = Stateful().double(), Stateful().double(), list[str]()
    if way != "pickled":  # hooks that are functions here cannot be
        for each in (model, plain):
            each.register_state_dict_post_hook(
                lambda module, state, prefix, _: state.update({f"{prefix}note": Tensor()})
            )
            each.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state.pop(f"{prefix}note", None))
            each.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    pipe = GPipe(model, devices=["cpu"] * 2)
    if way != "new":
        pipe = copy.deepcopy(pipe) if way == "copied" else pickle.loads(pickle.dumps(pipe))
        model = pipe[:]
    pipe.register_state_dict_pre_hook(lambda *_: calls.append("saving"))
    plain.epoch = 7
    pipe.load_state_dict(plain.state_dict())
    assert (model.epoch, calls) == (7, ["loaded"] * (way != "pickled"))
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
    assert calls.pop() == "saving"
    around, other = nn.ModuleDict({"a": pipe}), nn.ModuleDict({"a": Stateful().double()})
    around.load_state_dict({f"a.{name}": value for name, value in other["a"].state_dict().items()}, strict=False)
    assert model.epoch == 0
    assert calls == ["loaded", "loaded"] * (way != "pickled")
    torch.testing.assert_close(dict(model.named_parameters()), dict(other["a"].named_parameters()))
    pipe.float()
    assert model.table.dtype == torch.float32


def test_replaced_parameters_and_buffers_are_used():
    model = Jumbled(others=2).double()
    pipe = GPipe(model, devices=["cpu"] * 2)
    model.factor, model.gain = nn.Parameter(torch.tensor(5.0).double()), torch.tensor(3.0)
    model.embed.weight = nn.Parameter(torch.randn(4, 2).double())
    model.scale = 0.25
    expect_listed(pipe, model)
    torch.testing.assert_close(pipe(**batch())["logits"], model(**batch())["logits"])


def test_device_map_has_names_of_model():
    model = Model(others=2).double()
    pipe = GPipe(model, devices=["cpu"] * 2)
    assert {name for name, _ in model.named_parameters()} <= pipe.hf_device_map.keys()
    assert {*pipe.hf_device_map.values()} == {torch.device("cpu")}

"""Hooks that keep weights elsewhere and move them for each call come off; stages load what they kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial, update_wrapper
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe


class Kept(Mapping[str, Tensor]):
    """The tensors of a module; notes which were read."""

    def __init__(self, tensors: dict[str, Tensor], read: list[str]) -> None:
        self.tensors, self.read = tensors, read

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Moving:
    """A hook with the attributes of an ``AlignDevicesHook`` of accelerate."""

    def __init__(self, weights_map: Kept | None, recurse: bool = False) -> None:
        self.execution_device, self.weights_map, self.place_submodules = torch.device("cpu"), weights_map, recurse


def hooked(module: nn.Module, hook: Any) -> None:
    def forward(self: nn.Module, *args: Any) -> Any:
        raise AssertionError("the hook is still there")

    vars(module)["_old_forward"] = module.forward
    vars(module)["_hf_hook"] = hook
    vars(module)["forward"] = update_wrapper(partial(forward, module), module.forward)


def offloaded(model: nn.Module, read: list[str], *, whole: bool = False) -> nn.Module:
    """Move the tensors of each module, or of each child of the model at once, to a hook."""
    for module in model.children() if whole else model.modules():
        tensors = dict(module.named_parameters(recurse=whole)) | dict(module.named_buffers(recurse=whole))
        values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        hooked(module, Moving(Kept(values, read) if values else None, whole))
    return model.to("meta")


class Model(nn.Module):
    def __init__(self, *, ties: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4))
        self.last = nn.Linear(6, 6, bias=False)
        self.ties = ties
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.ties:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x)


def in_a_row() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def left(model: nn.Module) -> set[str]:
    return {name for module in model.modules() for name in vars(module)} & {"forward", "_hf_hook", "_old_forward"}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("make", [Model, partial(Model, ties=True), in_a_row])
def test_stages_load_what_hooks_keep(make: Any, whole: bool) -> None:
    read, plain, x = list[str](), make(), torch.randn(8, 6)
    model = offloaded(make(), read, whole=whole)
    assert all(parameter.is_meta for parameter in model.parameters())
    with closing(GPipe(model, [2, 2], devices=["cpu"] * 2, chunks=2)) as pipe:
        assert not left(model)
        assert read  # layer by layer, as stages were made
        assert [*pipe.state_dict()] == [*plain.state_dict()]
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        assert len([*model.parameters()]) == len([*plain.parameters()])
        pipe.eval(), plain.eval()
        torch.testing.assert_close(pipe(x), plain(x))


def test_hooks_over_weights_that_are_there_come_off(caplog: pytest.LogCaptureFixture) -> None:
    plain, model, x = Model(), Model(), torch.randn(8, 6)
    for module in model.modules():
        hooked(module, Moving(None))
    with caplog.at_level("INFO", "gpipe"), closing(GPipe(model, [2, 2], devices=["cpu"] * 2, chunks=2)) as pipe:
        assert sum("are removed" in record.message for record in caplog.records) == 1
        assert not left(model)
        torch.testing.assert_close(pipe.eval()(x), plain.eval()(x))


def test_other_hooks_stay() -> None:
    model = Model()
    hooked(model.layers[0], object())
    with closing(GPipe(model, [2, 2], devices=["cpu"] * 2)) as pipe, pytest.raises(AssertionError, match="still there"):
        pipe(torch.randn(8, 6))


@pytest.mark.parametrize("make", [Model, in_a_row])
def test_after_an_error_the_hooks_are_there(make: Any) -> None:
    model = offloaded(make(), [])
    before = {module: copy.copy(vars(module)) for module in model.modules()}
    with pytest.raises(ValueError, match="balance"):
        GPipe(model, [1, 1], devices=["cpu"] * 2)
    assert all(vars(module).keys() == own.keys() for module, own in before.items())
    assert left(model) == {"forward", "_hf_hook", "_old_forward"}

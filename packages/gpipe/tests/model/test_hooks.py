"""Hooks registered during a forward: temporary ones raise, permanent ones are kept."""

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

REFUSED = (
    r"registers a hook on '(layers\.0\.lin|head)' and removes it before it returns"
    "|uses a tensor of .* an attribute, a global or a hook"  # noticed first if it is called with another's tensor
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x)


class Model(nn.Module):
    """A model whose forward registers hooks that add ``by`` to the layers' inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(3, 3)
        self.kind = kind

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        handles = [*self.hooked(by)]
        try:
            for layer in self.layers:
                x = layer(x)
            return x + self.head(x)
        finally:
            for handle in handles:
                handle.remove()

    def hooked(self, by: Tensor) -> Any:
        if self.kind == "once" and not self.layers[0].lin._forward_hooks:
            self.layers[0].lin.register_forward_hook(lambda module, args, output: output * 2)
        if self.kind == "outside":
            yield self.head.register_forward_hook(lambda module, args, output: output * by)
        for layer in self.layers if self.kind in ("before", "after") else ():
            if self.kind == "before":
                yield layer.lin.register_forward_pre_hook(lambda module, args: (args[0] + by,))
            else:
                yield layer.lin.register_forward_hook(lambda module, args, output: output + by)


def piped(model: nn.Module) -> Any:
    return closing(GPipe(model, devices=["cpu"] * 3, chunks=4))


@pytest.mark.parametrize("kind", ["before", "after", "outside"])
@pytest.mark.parametrize("trains", [False, True])
def test_hooks_for_one_call_are_refused(kind: str, trains: bool) -> None:
    x = torch.randn(4, 3)
    model = Model(kind).train(trains)
    with piped(model) as pipe, torch.set_grad_enabled(trains):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED):
                pipe(x, x)
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())


@pytest.mark.parametrize("kind", ["none", "once"])
def test_permanent_hook_of_first_forward_stays(kind: str) -> None:
    x = torch.randn(4, 3)
    model = Model(kind).eval()
    with piped(model) as pipe, torch.no_grad():
        pipe(x, x)
        assert len(model.layers[0].lin._forward_hooks) == (kind == "once")
        torch.testing.assert_close(pipe(x, x), model(x, x))


def test_a_block_may_hook_its_own_modules() -> None:
    """No other micro-batch runs the block concurrently."""
    x = torch.randn(4, 3)
    model = Model("none").eval()
    for layer in model.layers:
        layer.forward = own_hooks(layer)
    with piped(model) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x, x), model(x, x))


def own_hooks(layer: nn.Module) -> Any:
    def forward(x: Tensor) -> Tensor:
        rows = len(x)
        handle = layer.lin.register_forward_hook(lambda module, args, output: output[:rows] * 2)
        try:
            out: Tensor = x + layer.lin(x)
            return out
        finally:
            handle.remove()

    return forward

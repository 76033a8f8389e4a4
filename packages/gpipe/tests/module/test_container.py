"""Containers of layers: a pipe matches the plain model, or raises an error naming the lost feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, verify_module

from ..layers import DOUBLE, linears, rows


class OnlyNamed(nn.Sequential):
    """A subclass as people write them: it only makes its layers."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Linear(width, width, dtype=DOUBLE), nn.Tanh())
        self.width = width

    def extra_repr(self) -> str:
        return f"width={self.width}"

    def encode(self, x: Tensor) -> Tensor:
        return self[0](x)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(OnlyNamed):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


class Twice(nn.Sequential):
    def __iter__(self) -> Any:
        return iter([*self._modules.values(), *self._modules.values()])


class Mixin:
    def forward(self, x: Tensor) -> Tensor:
        return -x


class Mixed(Mixin, nn.Sequential):
    pass


def of(kind: type[nn.Sequential]) -> nn.Sequential:
    return kind(*linears(2)) if kind not in (OnlyNamed, Scaled) else kind()


BELONGINGS: dict[str, Any] = {
    "parameters 'scale'": lambda m: setattr(m, "scale", nn.Parameter(torch.ones(3))),
    "buffers 'mean'": lambda m: m.register_buffer("mean", torch.ones(3)),
    "buffers 'hidden'": lambda m: m.register_buffer("hidden", None, persistent=False),
    "forward pre hooks": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "forward hooks": lambda m: m.register_forward_hook(lambda _, args, output: output * 2),
    "backward pre hooks": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "backward hooks": lambda m: m.register_full_backward_hook(lambda *_: None),
    "state dict pre hooks": lambda m: m.register_state_dict_pre_hook(lambda *_: None),
    "state dict hooks": lambda m: m.register_state_dict_post_hook(lambda *_: None),
    "load state dict pre hooks": lambda m: m.register_load_state_dict_pre_hook(lambda *_: None),
    "load state dict post hooks": lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
    "overrides 'forward' on the instance": lambda m: setattr(m, "forward", lambda x: x),
    "no layer under 'gap'": lambda m: m.add_module("gap", None),
}
KINDS = {OnlyNamed: "", nn.Sequential: "", Residual: "'forward'", Scaled: "'__call__'", Frozen: "'train'"} | {
    Twice: "'__iter__'",
    Mixed: "overrides 'forward' in class Mixin",
}


@given(st.sampled_from(list(KINDS)), st.sets(st.sampled_from(sorted(BELONGINGS)), max_size=3))
def test_containers_match_or_raise_naming_lost_feature(kind: type[nn.Sequential], belongings: set[str]) -> None:
    model = of(kind)
    for name in belongings:
        BELONGINGS[name](model)
    lost = [*belongings, *filter(None, [KINDS[kind]])]
    if not lost:
        expected = model(rows())
        torch.testing.assert_close(GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2)(rows()), expected)
        return
    for make in (lambda: GPipe(model, [1, 1], devices=["cpu"] * 2), lambda: verify_module(model)):
        with pytest.raises(TypeError, match=r"computes the layers of an nn\.Sequential and nothing else") as caught:
            make()
        assert all(word in str(caught.value) for name in lost for word in name.split())
        assert kind.__name__ in str(caught.value)


@pytest.mark.parametrize("kind", [Residual, Scaled, Frozen, Twice, Mixed])
def test_nested_containers_are_unrestricted(kind: type[nn.Sequential]) -> None:
    model = nn.Sequential(of(kind), *linears(1))
    for name in ("forward hooks", "parameters 'scale'", "buffers 'mean'"):
        BELONGINGS[name](model[0])
    expected = model(rows())
    torch.testing.assert_close(GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2)(rows()), expected)

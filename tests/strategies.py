"""Random models whose every layer treats each row by itself, so that cutting into micro-batches changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

DOUBLE = torch.float64

Shape = tuple[int, ...]
"""Of one row."""


class Named(nn.Module):
    """A layer that is a function, with a name to be shown in failures."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name = name
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)

    def extra_repr(self) -> str:
        return self.name


class Pair(nn.Module):
    """A tensor becomes a tuple of two that require grad, an integer one, and None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Any:
        return self.left(x), x.argmax(-1), None, x.sin()


class Join(nn.Module):
    """The tensor back again."""

    def forward(self, value: Any) -> Tensor:
        left, index, nothing, right = value
        assert nothing is None
        return left * right + index[..., None]


class Residual(nn.Module):
    """A layer and a way around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Frozen(nn.Linear):
    """A linear layer whose parameters do not learn."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, dtype=DOUBLE)
        self.requires_grad_(False)


# Each kind takes the shape of a row and gives layers and the shape that they make of it; None if it cannot.
Made = tuple[list[nn.Module], Shape] | None
Kind = Callable[[Shape, int], Made]


def _linear(shape: Shape, size: int) -> Made:
    return [nn.Linear(shape[-1], size, dtype=DOUBLE)], (*shape[:-1], size)


def _conv(shape: Shape, size: int) -> Made:
    if len(shape) != 3:
        return None
    return [nn.Conv2d(shape[0], size, 3, padding=1, dtype=DOUBLE)], (size, *shape[1:])


def _same(make: Callable[[Shape], nn.Module]) -> Kind:
    return lambda shape, size: ([make(shape)], shape)


def _pair(shape: Shape, size: int) -> Made:
    return [Pair(shape[-1]), Named("tuple", tuple), Join()], shape


def _to_image(shape: Shape, size: int) -> Made:
    if len(shape) != 1:
        return None
    return [nn.Linear(shape[0], 4 * size, dtype=DOUBLE), nn.Unflatten(1, (size, 2, 2))], (size, 2, 2)


def _to_row(shape: Shape, size: int) -> Made:
    return [nn.Flatten()], (int(torch.Size(shape).numel()),)


def _overwriting(make: Callable[[], nn.Module]) -> Kind:
    """After a copy, because whoever made the tensor may need it, which not even the plain model bears."""
    return lambda shape, size: ([Named("clone", torch.clone), make()], shape)


KINDS: dict[str, Kind] = {
    "linear": _linear,
    "conv": _conv,
    "layer norm": _same(lambda shape: nn.LayerNorm(shape, dtype=DOUBLE)),
    "frozen": _same(lambda shape: Frozen(shape[-1])),
    "residual": _same(lambda shape: Residual(nn.Linear(shape[-1], shape[-1], dtype=DOUBLE))),
    "tanh": _same(lambda shape: nn.Tanh()),
    "gelu": _same(lambda shape: nn.GELU()),
    "relu in place": _overwriting(lambda: nn.ReLU(inplace=True)),
    "leaky relu in place": _overwriting(lambda: nn.LeakyReLU(0.3, inplace=True)),
    "celu in place": _overwriting(lambda: nn.CELU(inplace=True)),
    "multiply in place": _overwriting(lambda: Named("mul_", lambda x: x.mul_(2))),
    "identity": _same(lambda shape: nn.Identity()),
    "view": _same(lambda shape: Named("view", lambda x: x.view_as(x))),
    "flip": _same(lambda shape: Named("flip", lambda x: x.flip(-1))),
    "transposed": _same(lambda shape: Named("mT", lambda x: x.transpose(-1, 1).contiguous().transpose(-1, 1))),
    "slice": _same(lambda shape: Named("slice", lambda x: x[..., :])),
    "detour": _same(lambda shape: Named("detach half", lambda x: 0.5 * x + 0.5 * x.detach())),
    "pair": _pair,
    "image": _to_image,
    "row": _to_row,
}


IMPURE: dict[str, Kind] = {
    "relu in place at once": _same(lambda shape: nn.ReLU(inplace=True)),
    "leaky relu in place at once": _same(lambda shape: nn.LeakyReLU(0.3, inplace=True)),
    "celu in place at once": _same(lambda shape: nn.CELU(inplace=True)),
}
"""Which overwrite what they get, whoever needs it; so not even the plain model computes everything made of them."""


@st.composite
def models(draw: st.DrawFn, kinds: dict[str, Kind] = KINDS) -> tuple[nn.Sequential, Shape]:
    """A model, and the shape of a row of its input. Sequentials may be nested."""
    shape: Shape = draw(st.sampled_from([(3,), (2, 3), (2, 2, 2)]))
    entry = shape
    layers: list[nn.Module] = []
    torch.manual_seed(draw(st.integers(0, 1000)))
    for kind in draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=6)):
        made = kinds[kind](shape, draw(st.integers(1, 3)))
        if made is not None:
            more, shape = made
            nested = len(more) == 1 and draw(st.booleans())
            layers += [nn.Sequential(*more)] if nested else more
    return nn.Sequential(*layers), entry


@st.composite
def balances(draw: st.DrawFn, layers: int) -> list[int]:
    """Sizes of non-empty blocks."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, layers - 1)), max_size=min(4, layers - 1)))) if layers > 1 else []
    return [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True) if end > start]

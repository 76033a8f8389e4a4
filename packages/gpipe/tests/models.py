"""Random models of typical layers, and functions to compare them.

Every part takes and returns ``(rows, 4, 6)``, so that any sequence of them is a model. Inside a part with several
layers, shapes may differ. Between layers, the tensor may be in a tuple or dict, with integers, constants and None.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gpipe import GPipe, is_recomputing
from gpipe.skip import Namespace
from microbatch import Batch, gather

from .layers import Call, Layer, Pop, Stash, on_backward
from .schedules import balance_by

CHANNELS, WIDTH = 4, 6


class OnMain(nn.Module):
    """A layer for the tensor, wherever it stands."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any) -> Any:
        return with_main(value, self.layer(main_of(value)))


def main_of(value: Any) -> Tensor:
    if isinstance(value, dict):
        return value["main"]
    return value[2] if isinstance(value, tuple) else value


def with_main(value: Any, x: Tensor) -> Any:
    if isinstance(value, dict):
        return {**value, "main": x}
    return (*value[:2], x, *value[3:]) if isinstance(value, tuple) else x


def fail(error: BaseException) -> NoReturn:
    raise error


class Failing(nn.Module):
    """The identity, unless ``error`` gives an error for the phase and the tensor."""

    def __init__(self, error: Callable[[str, Tensor], BaseException | None]) -> None:
        super().__init__()
        self.error = error

    def forward(self, value: Any) -> Any:
        x = main_of(value)
        error = self.error("recompute" if is_recomputing() else "forward", x)
        if error is not None:
            fail(error)
        error = self.error("backward", x) if x.requires_grad else None
        return with_main(value, x * 1 if error is None else on_backward(x, partial(fail, error)))


def to_tuple(value: Any) -> Any:
    """Integers first, None among tensors, and one that needs no grad."""
    x = main_of(value)
    return (integers(x), None, x, x.detach() > 0)


def integers(x: Tensor) -> Tensor:
    return (x.detach()[:, 0, 0] * 3).long()


def to_dict(value: Any) -> Any:
    x = main_of(value)
    return {"integers": integers(x), "none": None, "main": x, "nested": {"sizes": [x.detach().abs()]}}


def recurrent(dropout: float) -> nn.Module:
    inner = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=dropout, batch_first=True)
    return Layer(lambda s, x: s.m[0](x)[0], inner)


def attention(dropout: float) -> nn.Module:
    inner = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
    return Layer(lambda s, x: x + s.m[0](x, x, x, need_weights=False)[0], inner)


def lookup() -> nn.Module:
    """Return an embedding of integers computed from the input."""
    return Layer(lambda s, x: x + s.m[0]((x.detach()[..., 0] * 3).long().abs() % 5), nn.Embedding(5, WIDTH))


def residual(inner: nn.Module) -> nn.Module:
    return Layer(lambda s, x: x + s.m[0](x), inner)


def fresh() -> nn.Module:
    """Return a layer whose output is a new tensor that is not saved for the backward."""
    return Call(lambda x: x * 0.9)


def detours() -> nn.Module:
    """Has a parameter that gets no gradient."""
    often, never = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
    return Layer(lambda s, x: x * s.often, often=often, never=never)


class InPlace(nn.Module):
    """Works on its input itself, without parameters."""

    inplace = True

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.inplace else x.clone()).mul_(0.5).add_(0.1)


def counts() -> Layer:
    """Return a layer that counts its calls in two buffers, and whose output depends on both."""

    def forward(s: Layer, x: Tensor) -> Tensor:
        s.calls += 1
        s.scale = s.scale * 0.9
        return x * s.scale + s.calls

    return Layer(forward, calls=torch.zeros(()), scale=torch.full((), 0.5))


def stashed(what: str, value: Any) -> Tensor | None:
    x = main_of(value)
    return {"none": None, "constant": x.detach().clone(), "copy": x * 1.5}[what]


def joined(in_place: bool, value: Any, skip: Tensor | None) -> Any:
    if skip is None:
        return value
    return with_main(value, main_of(value) + (skip.tanh_() if in_place else skip))


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Part:
    """A kind of layer, or of several in a row.

    Attributes:
        make: a new one, or a list of several.
        draws: it draws random numbers in training.
        by_microbatch: what it computes depends on how the mini-batch is cut, so that the plain model is no oracle.
        in_place: it changes its input.
        output: whether torch needs its output as it is for the backward, or it is just the input.
    """

    make: Callable[[], nn.Module | list[nn.Module]]
    draws: bool = False
    by_microbatch: bool = False
    in_place: bool = False
    output: Literal["free", "kept", "input"] = "free"

    def layers(self) -> list[nn.Module]:
        made = self.make()
        return made if isinstance(made, list) else [made]


def _frozen_norm() -> nn.Module:
    norm = nn.BatchNorm1d(CHANNELS)
    nn.init.uniform_(norm.running_mean)
    return Frozen(norm)


class Frozen(nn.Module):
    """Always in evaluation mode."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.layer.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _encoder(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout, batch_first=True)


def _image() -> list[nn.Module]:
    return [Call(lambda x: x.reshape(-1, 2, 3, 4)), nn.Conv2d(2, 2, 3, padding=1), Call(lambda x: x.reshape(-1, 4, 6))]


def _row() -> list[nn.Module]:
    size = CHANNELS * WIDTH
    return [nn.Flatten(), nn.Linear(size, 5), nn.Linear(5, size), nn.Unflatten(1, (CHANNELS, WIDTH))]


PARTS = {
    "linear": Part(lambda: nn.Linear(WIDTH, WIDTH)),
    "linear without bias": Part(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "conv": Part(lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)),
    "layer norm": Part(lambda: nn.LayerNorm(WIDTH)),
    "tanh": Part(nn.Tanh, output="kept"),
    "gelu": Part(nn.GELU),
    "relu in place": Part(lambda: nn.ReLU(inplace=True), in_place=True, output="kept"),
    "leaky relu in place": Part(lambda: nn.LeakyReLU(0.1, inplace=True), in_place=True, output="kept"),
    "celu in place": Part(lambda: nn.CELU(inplace=True), in_place=True, output="kept"),
    "in place": Part(InPlace, in_place=True),
    "nested": Part(lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, WIDTH)))),
    "residual": Part(lambda: residual(nn.Linear(WIDTH, WIDTH))),
    "image": Part(_image, output="input"),
    "row": Part(_row),
    "flip": Part(lambda: Call(lambda x: x.flip(-1))),
    "transposed": Part(lambda: Call(lambda x: x.mT.contiguous().mT), output="input"),
    "slice": Part(lambda: Call(lambda x: x[..., :]), output="input"),
    "half detached": Part(lambda: Call(lambda x: 0.5 * x + 0.5 * x.detach())),
    "identity": Part(nn.Identity, output="input"),
    "view": Part(lambda: Call(lambda x: x.flatten(1).unflatten(1, (CHANNELS, WIDTH))), output="input"),
    "lstm": Part(lambda: recurrent(0.0), output="kept"),
    "attention": Part(lambda: attention(0.0)),
    "encoder": Part(lambda: _encoder(0.0)),
    "embedding": Part(lookup),
    "unused parameter": Part(detours),
    "weight norm": Part(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "orthogonal": Part(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))),
    "frozen batch norm": Part(_frozen_norm),
    "untracked batch norm": Part(lambda: nn.BatchNorm1d(CHANNELS, track_running_stats=False), by_microbatch=True),
    "batch norm": Part(lambda: nn.BatchNorm1d(CHANNELS), by_microbatch=True),
    "cumulative batch norm": Part(lambda: nn.BatchNorm1d(CHANNELS, momentum=None), by_microbatch=True),
    "spectral norm": Part(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), by_microbatch=True),
    "buffers": Part(counts, by_microbatch=True),
    "dropout": Part(lambda: nn.Dropout(0.4), draws=True),
    "dropout in place": Part(lambda: nn.Dropout(0.4, inplace=True), draws=True, in_place=True),
    "dropout of channels": Part(lambda: nn.Dropout1d(0.4), draws=True),
    "alpha dropout": Part(lambda: nn.AlphaDropout(0.4), draws=True),
    "random relu": Part(lambda: nn.RReLU(), draws=True),
    "random lstm": Part(lambda: recurrent(0.4), draws=True, output="kept"),
    "random attention": Part(lambda: attention(0.4), draws=True),
    "random encoder": Part(lambda: _encoder(0.4), draws=True),
}


@dataclass(frozen=True)
class Recipe:
    """Everything needed to create and train a model; printed if a property fails."""

    layers: tuple[tuple[str, str], ...]
    """The kind of value that each layer is given, ``tensor``, ``tuple`` or ``dict``, and its name in PARTS."""
    skips: tuple[tuple[int, int, str, bool], ...]
    """Stashed before which layer, popped before which, what, and whether the popped one is changed in place."""
    frozen: frozenset[int]
    balance_seed: int
    stages: int
    rows: tuple[int, ...]
    chunks: int
    checkpoint: str | tuple[str, ...]
    """One mode for all stages, or one per stage."""
    dtype: torch.dtype
    training: bool
    input_needs_grad: bool
    seed: int
    deferred: bool = False
    accumulates: bool = False
    """Gradients of all mini-batches add up."""
    overwrites: bool = False
    """If True, in-place layers modify any input, and torch raises if a backward needs it."""

    @property
    def by_microbatch(self) -> bool:
        return any(PARTS[name].by_microbatch for _, name in self.layers)

    @property
    def draws(self) -> bool:
        return self.training and any(PARTS[name].draws for _, name in self.layers)

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        layers = [[OnMain(layer) for layer in PARTS[name].layers()] for _, name in self.layers]
        for k in self.frozen:
            nn.ModuleList(layers[k]).requires_grad_(False)
        return nn.Sequential(*_in_order(self, layers)).to(self.dtype).train(self.training)

    def balance(self, layers: int) -> list[int]:
        return balance_by(self.balance_seed, layers, self.stages)

    def modes(self, stages: int) -> str | list[str]:
        """Return the ``checkpoint`` argument for a pipe with this number of stages."""
        return self.checkpoint if isinstance(self.checkpoint, str) else list(self.checkpoint[:stages])

    def batches(self) -> list[Tensor]:
        """Return one mini-batch per entry of ``rows``, none of them a leaf, so that the first layer may be in-place."""
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randn(n, CHANNELS, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype) for n in self.rows
        ]


def _in_order(recipe: Recipe, layers: Sequence[Sequence[nn.Module]]) -> list[nn.Module]:
    """The layers, the ones that change the kind of value where the next needs another, and the skips.

    An in-place layer gets a copy of its input if torch would otherwise raise for the plain model.
    """
    spaces = [Namespace() for _ in recipe.skips]
    kind, output = "tensor", "free"
    order: list[nn.Module] = []
    for k, ((wanted, name), own) in enumerate(zip(recipe.layers, layers, strict=True)):
        for ns, (start, stop, what, in_place) in zip(spaces, recipe.skips, strict=True):
            order += [Stash(partial(stashed, what), same).isolate(ns)] if start == k else []
            order += [Pop(partial(joined, in_place)).isolate(ns)] if stop == k else []
        if wanted != kind:
            order.append(Call({"tensor": main_of, "tuple": to_tuple, "dict": to_dict}[wanted]))
            kind = wanted
        part = PARTS[name]
        if part.in_place and output == "kept" and not recipe.overwrites:
            order.append(OnMain(fresh()))
        order += own
        output = output if part.output == "input" and not part.in_place else part.output
    return order


MODES = st.sampled_from(["never", "except_last", "always", "offload"])


def recipes(parts: Sequence[str] = tuple(PARTS)) -> st.SearchStrategy[Recipe]:
    """Models out of ``parts``, small enough to shrink well."""
    kinds = st.sampled_from(["tensor", "tensor", "tuple", "dict"])
    layers = st.lists(st.tuples(kinds, st.sampled_from(list(parts))), min_size=1, max_size=7)
    return layers.flatmap(_recipes)


def _recipes(layers: list[tuple[str, str]]) -> st.SearchStrategy[Recipe]:
    n = len(layers)
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(sorted)
    skips = st.tuples(ends, st.sampled_from(["copy", "copy", "constant", "none"]), st.booleans())
    return st.builds(
        Recipe,
        layers=st.just(tuple(layers)),
        skips=st.lists(skips.map(lambda s: (*s[0], s[1], s[2])), max_size=2).map(tuple),
        frozen=st.frozensets(st.integers(0, n - 1), max_size=n),
        balance_seed=st.integers(0, 2**16),
        stages=st.integers(1, 4),
        rows=st.lists(st.integers(1, 9), min_size=2, max_size=2).map(tuple),
        chunks=st.integers(1, 6),
        checkpoint=MODES | st.tuples(MODES, MODES, MODES, MODES),
        dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
        training=st.sampled_from([True, True, True, False]),
        input_needs_grad=st.booleans(),
        seed=st.integers(0, 2**16),
        deferred=st.booleans(),
        accumulates=st.booleans(),
    )


def pipe_of(
    recipe: Recipe, model: nn.Sequential, checkpoint: Any = None, devices: Callable[[int], list[str]] | None = None
) -> GPipe:
    """Return a pipe of a copy of ``model``, with stages on the CPU or on ``devices(number of stages)``."""
    balance = recipe.balance(len(model))
    return GPipe(
        copy.deepcopy(model),
        balance,
        devices=devices(len(balance)) if devices else ["cpu"] * len(balance),
        chunks=recipe.chunks,
        checkpoint=checkpoint or recipe.modes(len(balance)),
        deferred_batch_norm=recipe.deferred,
    )


class Oracle(nn.Module):
    """The model on the full mini-batch, or in a loop over micro-batches if the results differ by design."""

    def __init__(self, recipe: Recipe, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe

    def forward(self, x: Tensor) -> Any:
        if not self.recipe.by_microbatch:
            return self.model(x)
        seen = WholeNorms(self.model) if self.recipe.deferred and self.recipe.training else None
        with seen or nullcontext():
            return gather([Batch(self.model(part.clone())) for part in x.chunk(self.recipe.chunks)])


class WholeNorms:
    """The expected effect of deferred batch norm: statistics updated once, from the full mini-batch."""

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d) and m.track_running_stats]
        self._seen = [(norm, copy.deepcopy(norm), []) for norm in norms if norm.training]

    def __enter__(self) -> None:
        self._hooks = [
            norm.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].detach().clone()))
            for norm, _, rows in self._seen
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for norm, whole, rows in self._seen:
            whole(torch.cat(rows))
            for own, buffer in zip(norm.buffers(), whole.buffers(), strict=True):
                own.data.copy_(buffer)  # invisible to autograd, as the backward of this forward is still to come


def optimize(model: nn.Module) -> None:
    """Apply one step of SGD."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def assert_close(found: Any, expected: Any, recipe: Recipe) -> None:
    tolerance = 1e-7 if recipe.dtype is torch.float64 else 2e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)

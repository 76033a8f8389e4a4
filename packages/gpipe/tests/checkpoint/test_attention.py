"""Layers choose the kernels of attention for themselves, whatever other stages compute at the same moment."""

import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpipe import GPipe

from ..layers import DOUBLE, MODES, Layer, rows

each_mode = pytest.mark.parametrize("mode", MODES)
SETTINGS = [
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
]


class Row(nn.Module):
    """Runs its blocks in sequence, optionally inside a choice of kernels."""

    def __init__(self, *layers: nn.Module, kernels: SDPBackend | None = None) -> None:
        super().__init__()
        self.layers, self.kernels = nn.ModuleList(layers), kernels

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is None:
            return self.through(x)
        with sdpa_kernel(self.kernels):
            return self.through(x)

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def attended(s: Layer, x: Tensor) -> Tensor:
    """Attention between the columns, by the kernel that is chosen."""
    heads = s.m[0](x)[:, None, :, None]
    s.chosen.append(tuple(read() for read in SETTINGS))
    out = F.scaled_dot_product_attention(heads, heads, heads)
    # The graph shows which kernel was used.
    names = set()
    node: Any = out.grad_fn
    while node is not None:
        names.add(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    s.kernels.append(any("ScaledDotProduct" in name for name in names) if out.requires_grad else None)
    return out.flatten(1)


def attention(act: Callable[[Layer, Tensor], Tensor] = attended) -> Layer:
    torch.manual_seed(0)
    return Layer(act, nn.Linear(3, 3, dtype=DOUBLE), chosen=[], kernels=[], calls=[])


def exact(s: Layer, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attended(s, x)


def trained(model: nn.Module, x: Tensor, of: nn.Module) -> list[Tensor]:
    of.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in of.parameters() if parameter.grad is not None]]


@each_mode
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
@pytest.mark.parametrize("own_forward", [True, False])
def test_concurrent_stages_may_choose_different_kernels(mode: str, schedule: str, own_forward: bool):
    """The first stage is inside its choice for the second micro-batch while the second stage computes the first."""
    inside, computed = threading.Event(), threading.Event()
    main = threading.get_ident()

    def first(s: Layer, x: Tensor) -> Tensor:
        s.calls.append(None)
        with sdpa_kernel(SDPBackend.MATH):
            if threading.get_ident() != main and len(s.calls) == 2:
                inside.set()
                assert computed.wait(60)
            return attended(s, x)

    def second(s: Layer, x: Tensor) -> Tensor:
        if threading.get_ident() != main:
            assert inside.wait(60)
        out = attended(s, x)
        computed.set()
        return out

    before = [read() for read in SETTINGS]
    layers = attention(first), attention(second)
    whole = Row(*layers)
    x = rows(4)
    expected = trained(whole, x, whole)
    for layer in layers:
        layer.kernels.clear()
        layer.chosen.clear()
        layer.calls.clear()
    computed.clear()
    model: Any = whole if own_forward else nn.Sequential(*layers)
    options: dict[str, Any] = {"blocks": ["layers.0", "layers.1"]} if own_forward else {}
    with closing(GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint=mode, **options)) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            loss = pipe.step(x, loss_fn=lambda out: out.square().sum(), reduction="sum", schedule=schedule)
            found = [torch.as_tensor(loss), *[each.grad for each in pipe.parameters()]]
            torch.testing.assert_close(found, expected)
    assert set(layers[0].kernels) <= {False, None}
    assert set(layers[1].kernels) <= {True, None}
    assert set(layers[0].chosen) == {(True, False, False)}
    assert set(layers[1].chosen) == {tuple(before)}
    assert [read() for read in SETTINGS] == before


@each_mode
def test_overlapping_choices_restore_process_settings(mode: str):
    """Each is inside while the other enters, and the first to enter leaves first."""
    events = {name: threading.Event() for name in ("first is in", "second is in", "first is out")}

    def first(s: Layer, x: Tensor) -> Tensor:
        s.calls.append(None)
        waits = len(s.calls) == 2
        with sdpa_kernel(SDPBackend.MATH):
            if waits:
                events["first is in"].set()
                assert events["second is in"].wait(60)
            x = attended(s, x)
        if waits:
            events["first is out"].set()
        return x

    def second(s: Layer, x: Tensor) -> Tensor:
        assert events["first is in"].wait(60)
        with sdpa_kernel(SDPBackend.MATH):
            events["second is in"].set()
            assert events["first is out"].wait(60)
            return attended(s, x)

    before = [read() for read in SETTINGS]
    model = Row(attention(first), attention(second))
    blocks = ["layers.0", "layers.1"]
    with closing(GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=2, blocks=blocks, checkpoint=mode)) as pipe:
        pipe(rows(4)).sum().backward()
    assert [read() for read in SETTINGS] == before


@each_mode
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_a_model_that_chooses_around_its_blocks(mode: str, schedule: str):
    """Recomputation is outside the forward, but uses the same kernels."""
    model = Row(*[attention() for _ in range(3)], kernels=SDPBackend.MATH)
    x = rows(4)
    expected = trained(model, x, model)
    blocks = [f"layers.{k}" for k in range(3)]
    with closing(GPipe(model, [1, 2], devices=["cpu", "cpu"], chunks=2, blocks=blocks, checkpoint=mode)) as pipe:
        for way in (partial(trained, pipe, x, model), partial(_step, pipe, x, model, schedule)):
            torch.testing.assert_close(way(), expected)
    assert {kernel for layer in model.layers for kernel in layer.kernels} <= {False, None}
    assert all(each == (True, False, False) for layer in model.layers for each in layer.chosen)


def _step(pipe: GPipe, x: Tensor, model: nn.Module, schedule: str) -> list[Tensor]:
    model.zero_grad()
    loss = pipe.step(x, loss_fn=lambda out: out.square().sum(), reduction="sum", schedule=schedule)
    return [torch.as_tensor(loss), *[parameter.grad for parameter in model.parameters()]]


def test_choice_around_run_applies_to_layers():
    model = Row(attention(), attention())
    pipe = GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=2, blocks=["layers.0", "layers.1"], checkpoint="always")
    with closing(pipe), sdpa_kernel(SDPBackend.MATH):
        pipe(rows(4)).sum().backward()
    assert {kernel for layer in model.layers for kernel in layer.kernels} == {False}


def test_attention_uses_random_numbers_of_its_layer():
    """An attention is intercepted, and so are its internal operations."""

    def dropped(s: Layer, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            heads = s.m[0](x)[:, None, :, None]
            return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).flatten(1)

    found = []
    for mode in ("never", "always"):
        model = Row(attention(dropped), attention(dropped))
        blocks = ["layers.0", "layers.1"]
        with closing(GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=2, blocks=blocks, checkpoint=mode)) as pipe:
            torch.manual_seed(1)
            found.append(trained(pipe, rows(4), model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.one_in(3)
@each_mode
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernels", [None, SDPBackend.MATH])
def test_a_compiled_block_attends_as_the_plain_model(mode: str, kernels: SDPBackend | None):
    def act(s: Layer, x: Tensor) -> Tensor:
        heads = s.m[0](x)[:, None, :, None]
        with nullcontext() if kernels is None else sdpa_kernel(kernels):
            return F.scaled_dot_product_attention(heads, heads, heads).flatten(1)

    model, x = Row(attention(act), attention(act)), rows(4)
    expected = trained(model, x, model)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    blocks = ["layers.0", "layers.1"]
    with closing(GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=2, blocks=blocks, checkpoint=mode)) as pipe:
        torch.testing.assert_close(trained(pipe, x, model), expected)
    torch.compiler.reset()

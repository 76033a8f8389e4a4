"""Hooks that layers register on tensors fire as often, and with the same, as in the plain loop over micro-batches."""

from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe

from ..layers import DOUBLE, MODES, Layer, assert_same, linears, piped, rows, running, trained
from ..schedules import ALONE

PLACES = ("given", "own", "linear", "by parameter")

Heard = list[tuple[int, Tensor]]


def on_tensor(k: int, tensor: Tensor, heard: Heard) -> None:
    tensor.register_hook(lambda gradient: heard.append((k, gradient.clone())) or gradient * 0.5 + 0.1)


def before_node(k: int, tensor: Tensor, heard: Heard) -> None:
    node = tensor.grad_fn
    if node is not None:
        node.register_prehook(lambda found: heard.append((k, found[0].clone())) or (found[0] * 0.5, *found[1:]))


def after_node(k: int, tensor: Tensor, heard: Heard) -> None:
    node = tensor.grad_fn
    if node is not None:
        node.register_hook(lambda _, found: heard.append((k, found[0].clone())))


def retained(k: int, tensor: Tensor, heard: Heard) -> None:
    if not tensor.is_leaf:
        tensor.retain_grad()
        heard.append((k, tensor))


def several(k: int, tensor: Tensor, heard: Heard) -> None:
    hook = lambda found: heard.append((k, found[0].clone()))  # noqa: E731
    torch.autograd.graph.register_multi_grad_hook((tensor, tensor.sin()), hook)


KINDS = {each.__name__: each for each in (on_tensor, before_node, after_node, retained, several)}


def hook_from(s: Layer, value: Tensor) -> Tensor:
    """Registers a hook on one of the tensors of its forward, or its node, from a certain row of the input on."""
    number, x = value[:, :1].detach(), value[:, 1:]
    own = x.sin()
    linear = s.m[0](own)
    scaled = linear * s.scale
    tensor = dict(zip(PLACES, (x, own, linear, scaled), strict=True))[s.place]
    if tensor.requires_grad and float(number[0]) >= s.start:
        KINDS[s.kind](s.k, tensor, s.heard)
    return torch.cat([number, x + scaled], 1)


def hooked(layers: list[tuple[str, str, int]], heard: Heard) -> nn.Sequential:
    torch.manual_seed(0)
    made = []
    for k, (place, kind, start) in enumerate(layers):
        scale = nn.Parameter(torch.rand(3, dtype=DOUBLE))  # a separate one, or no backward could be split
        linear = nn.Linear(3, 3, dtype=DOUBLE)
        made.append(Layer(hook_from, linear, scale=scale, k=k, place=place, kind=kind, start=start, heard=heard))
    return nn.Sequential(*made)


def numbered_rows(first: int) -> Tensor:
    return torch.cat([torch.arange(first, first + 6, dtype=DOUBLE)[:, None], rows(6)], 1)


def in_order(heard: Heard) -> list[tuple[int, Any]]:
    # Retained gradients are read at the end. A graph that was only recomputed has none.
    found = [(k, each.grad if each.grad_fn is not None else each) for k, each in heard]
    return sorted([(k, each.tolist()) for k, each in found if each is not None])


@given(
    st.lists(
        st.tuples(st.sampled_from(PLACES), st.sampled_from(sorted(KINDS)), st.sampled_from([0, 0, 3, 6, 9])),
        min_size=1, max_size=3,
    ),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(MODES),
    st.sampled_from([None, "zero_bubble", *ALONE]),
    st.booleans(),
)  # fmt: skip
def test_tensor_hooks_fire_like_in_plain_loop(
    layers: list[tuple[str, str, int]], stages: int, chunks: int, mode: str, schedule: str | None, inline: bool
):
    heard: tuple[Heard, Heard] = [], []
    model = hooked(layers, heard[0])
    stages = min(stages, len(layers))
    balance = [1] * (stages - 1) + [len(layers) - stages + 1]
    for first in (0, 6):
        for part in numbered_rows(first).chunk(chunks):
            model(part)[:, 1:].square().sum().backward()
    pipe = gpipe.GPipe(
        hooked(layers, heard[1]), balance, devices=[f"cpu:{j}" for j in range(stages)], chunks=chunks, checkpoint=mode
    )
    with closing(pipe), running(inline):
        for first in (0, 6):
            trained(pipe, numbered_rows(first), schedule, lambda y, _: y[:, 1:].square().sum())
    assert_same(pipe, model)
    torch.testing.assert_close(in_order(heard[1]), in_order(heard[0]))


def hooks_weight(s: Layer, x: Tensor) -> Tensor:
    """Registers a hook on a weight, and removes it again if it is tidy."""
    handle = getattr(s.m[0].weight, s.register)(lambda _: None)
    y: Tensor = s.m[0](x)
    if s.tidy:
        handle.remove()
    return y


@given(
    st.sampled_from(["register_hook", "register_post_accumulate_grad_hook"]),
    st.booleans(),
    st.sampled_from(MODES),
    st.sampled_from([None, "1f1b", "zero_bubble"]),
)
def test_hooks_left_on_parameters_by_forward_raise(register: str, tidy: bool, mode: str, way: str | None) -> None:
    layers = [*linears(1), Layer(hooks_weight, *linears(1), register=register, tidy=tidy), *linears(1)]
    pipe = piped(nn.Sequential(*layers), [1, 2], chunks=3, checkpoint=mode)
    refused = pytest.raises(RuntimeError, match="a layer registered a hook on a parameter")
    with nullcontext() if tidy else refused:
        trained(pipe, rows(), way)
    assert all((parameter.grad is not None) == tidy for parameter in pipe.parameters())

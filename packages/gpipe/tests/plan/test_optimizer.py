"""Estimated bytes of optimizer state, compared with the state of real optimizers."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from gpipe._plan._optimizer import State, optimizer_bytes

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9}),
    "adam": (optim.Adam, {}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "adamw": (optim.AdamW, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adagrad": (optim.Adagrad, {}),
    "adadelta": (optim.Adadelta, {}),
    "rmsprop": (optim.RMSprop, {}),
    "adafactor": (optim.Adafactor, {}),
}

shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4)


def layers_of(given: list[list[int]], dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [nn.ParameterList([nn.Parameter(torch.ones(*shape, dtype=dtype))]) for shape in given]


def stateful(optimizer: optim.Optimizer, layers: list[nn.Module]) -> list[int]:
    """Return the bytes of each layer's state after a step, without step counts and NAdam's scalars."""
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    left_out = {"step", "mu_product"}
    found = []
    for layer in layers:
        values = [optimizer.state[p].items() for p in layer.parameters()]
        found.append(sum(v.nbytes for each in values for k, v in each if k not in left_out and isinstance(v, Tensor)))
    return found


@given(st.sampled_from(sorted(OPTIMIZERS)), shapes, st.sampled_from([torch.float32, torch.float64]))
def test_estimated_bytes_match_the_real_state(name: str, given: list[list[int]], dtype: torch.dtype) -> None:
    layers = layers_of(given, dtype)
    kind, options = OPTIMIZERS[name]
    optimizer = kind([p for layer in layers for p in layer.parameters()], lr=0.1, **options)
    assert optimizer_bytes(name, layers) == optimizer_bytes(optimizer, layers) == stateful(optimizer, layers)
    if not options:
        assert optimizer_bytes(kind, layers) == optimizer_bytes(name, layers)


@given(st.integers(1, 10_000))
def test_eight_bit_state(count: int) -> None:
    (found,) = optimizer_bytes("adamw_8bit", layers_of([[count]]))
    assert found == 8 * count if count < 4096 else 2 * count < found <= 2.04 * count + 8


def test_state_is_counted_once_per_trained_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4).requires_grad_(False))
    assert optimizer_bytes(8, model) == [8 * 20, 0, 0]
    assert optimizer_bytes("adam", [model[0], model[0]]) == [2 * 4 * 20, 0]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("AdamW", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("adamw_bnb_8bit", "adamw8bit"),
        ("paged_adamw_8bit", "adamw8bit"),
        ("PagedAdamW32bit", "adamw32bit"),
        ("lion_8bit", "lion8bit"),
    ],
)
def test_names_used_by_other_libraries(name: str, same: str) -> None:
    layers = layers_of([[5000], [3, 4]], torch.bfloat16)
    assert optimizer_bytes(name, layers) == optimizer_bytes(same, layers)


def test_unknown_optimizers_raise() -> None:
    class Own(optim.SGD):
        pass

    with pytest.raises(ValueError, match=r"optimizer: expected one of 'sgd', .*; got <class .*Own'>"):
        optimizer_bytes(Own, layers_of([[1]]))
    with pytest.raises(ValueError, match=re.escape("got 'adamw_4bit'")):
        optimizer_bytes("adamw_4bit", layers_of([[1]]))


def test_half_precision_parameters_may_have_32_bit_state() -> None:
    assert State("adamw", 32, 2).count_bytes(nn.Parameter(torch.ones(5, dtype=torch.bfloat16))) == 2 * 4 * 5

"""Either all layers are moved to their devices, or none, and only the pipe can move them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipe.module._partition
from gpipe import GPipe

from ..layers import DOUBLE, assert_trains_like, linears, piped, state


class FullError(RuntimeError):
    """Raised by a device that is full, or a layer that cannot be moved."""


def blocks(count: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(count)))


@given(st.integers(0, 3), st.booleans(), st.booleans())
def test_failing_device_moves_nothing(failing: int, deferred: bool, trained: bool) -> None:
    """Layers are moved to 'meta', which every build of torch has, because they must leave their device."""
    model = blocks(4)
    if trained:
        model(torch.randn(4, 3)).sum().backward()
    before, values = state(model), copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    def move(block: nn.Module, device: torch.device) -> None:
        if block[0] is model[failing]:
            block[0][0].to("meta")  # some of it had room
            raise FullError
        block.to("meta")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpipe.module._tied, "move", move)
        with pytest.raises(FullError):
            GPipe(model, [1] * 4, devices=["cpu"] * 4, deferred_batch_norm=deferred)
    assert state(model) == before
    torch.testing.assert_close(model.state_dict(), values)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_layer_hides_no_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3))))
    with pytest.raises(ValueError, match=r"'1.0.weight' of partition 1 .* cannot be moved to 'meta'"):
        GPipe(model, [1, 1], devices=["cpu", "meta"])


def around(middle: nn.Module) -> nn.Module:
    return nn.Sequential(middle, linears()[2])


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda outer: outer.to("meta"),
    "to, with a dtype": lambda outer: outer.to("meta", torch.float16),
    "to_empty": lambda outer: outer.to_empty(device="meta"),
    "_apply": lambda outer: outer._apply(lambda tensor: torch.empty_like(tensor, device="meta")),
}
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda outer: outer.half(),
    "float": lambda outer: outer.float(),
    "type": lambda outer: outer.type(torch.float32),
    "to a dtype": lambda outer: outer.to(torch.bfloat16),
    "to where it is": lambda outer: outer.to("cpu"),
    "cpu": lambda outer: outer.cpu(),
    "both": lambda outer: outer.to("cpu", torch.float32),
    "channels last": lambda outer: outer.to(memory_format=torch.channels_last),
    "share_memory": lambda outer: outer.share_memory(),
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_a_pipe_raises_and_moves_nothing(name: str) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    before = state(pipe)
    with pytest.raises(TypeError, match=r"denied to move parameters and buffers by 'cpu' to 'meta'.*devices="):
        MOVES[name](around(pipe))
    assert state(pipe) == before
    assert_trains_like(pipe, linears())


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_other_changes_are_those_of_the_plain_model(name: str, used: bool) -> None:
    outer, plain = around(piped(linears(), [1, 2], chunks=2, checkpoint="always")), around(linears())
    if used:
        assert_trains_like(outer, plain)
    for each in (outer, plain):
        CHANGES[name](each)
    assert [p.dtype for p in outer.parameters()] == [p.dtype for p in plain.parameters()]
    assert [p.is_shared() for p in outer.parameters()] == [p.is_shared() for p in plain.parameters()]
    for each in (outer, plain):
        each.to(DOUBLE)
    assert_trains_like(outer, plain)

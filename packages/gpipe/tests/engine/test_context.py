"""Thread-local settings of the caller apply to layers, in forward and recomputation."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from gpipe import GPipe

from ..layers import Call, assert_same, each_mode, each_way, on_backward, piped, rows


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def assert_nearly(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Compare up to bfloat16 precision, because only the loop accumulates gradients in bfloat16."""
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm()) < 0.02 * float(theirs.norm())


class KeepsCasts(nn.Linear):
    """Keeps what autograd saves of casts of its weight."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.casts: dict[int, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(self.pack, lambda saved: saved):
            return super().forward(x)

    def pack(self, saved: Tensor) -> Tensor:
        if saved.dtype is torch.bfloat16 and saved.shape == (6, 6):
            self.casts[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved


@each_mode
@each_way
def test_autocast_casts_weights_once_per_phase(mode: str, way: Any):
    """The threads share one autocast cache. None may clear it while others compute, and it is empty in the end."""
    layers = [KeepsCasts() for _ in range(4)]
    x = torch.randn(32, 6, requires_grad=True)
    pipe = GPipe(nn.Sequential(*layers), [1] * 4, devices=["cpu"] * 4, chunks=8, checkpoint=mode)
    with closing(pipe), way():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = pipe(x * 1)
            forwards = [{*layer.casts} for layer in layers]
            assert [len(casts) for casts in forwards] == [1] * 4
            output.float().sum().backward()
            recomputed = [len(layer.casts.keys() - casts) for layer, casts in zip(layers, forwards, strict=True)]
            assert recomputed == [int(mode in ("always", "except_last"))] * 4
            for layer in layers:
                layer.casts.clear()


HALVES = [torch.float16, torch.bfloat16]


@each_mode
@each_way
@pytest.mark.parametrize("outer", HALVES)
@pytest.mark.parametrize("inner", HALVES)
def test_layers_with_an_autocast_of_their_own(mode: str, way: Any, outer: torch.dtype, inner: torch.dtype):
    """Inputs, outputs, losses and gradients may be of a dtype that the caller's autocast does not know."""

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", inner):
                return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Own(6, 6), nn.Tanh(), Own(6, 6))
    x = torch.randn(8, 6).to(inner)
    with closing(piped(model, [1, 2], chunks=4, checkpoint=mode)) as pipe, way():
        ways = [(model, model), (pipe, pipe), (pipe, lambda start: pipe.step(start, loss_fn=Tensor.mean))]
        found = [gradients_of(*each, x, outer) for each in ways]
    assert_nearly(found[1], found[0])
    assert_nearly(found[2], found[0])


def gradients_of(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, autocast: torch.dtype) -> list[Tensor]:
    module.zero_grad()
    start = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast):
        output = run(start)
        assert output.dtype is x.dtype
        if output.requires_grad:
            output.mean().backward()
    return [each.grad for each in (start, *module.parameters())]


@each_mode
@each_way
def test_backwards_inside_stay_on_their_worker(mode: str, way: Any):
    """An autograd thread might deadlock with a worker."""

    def look() -> None:
        seen.append(torch._C._is_multithreading_enabled())

    seen: list[bool] = []
    layer = Call(lambda x: on_backward((look(), x)[1], look))
    pipe = piped(nn.Sequential(nn.Linear(6, 6), layer), [1, 1], chunks=2, checkpoint=mode)
    with way():
        pipe(torch.randn(4, 6)).sum().backward()
    recomputations = {"never": 0, "except_last": 1, "always": 2, "offload": 0}[mode]
    assert seen == [False] * (4 + recomputations)
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_saved_tensors_hooks(mode: str):
    model = perceptron()
    pipe = piped(model, [2, 3], chunks=2, checkpoint=mode)
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.shape)
        return tensor

    x = torch.randn(8, 6)
    with saved_tensors_hooks(pack, unpack):
        output = pipe(x)
    output.square().sum().backward()
    model(x).square().sum().backward()
    assert_same(pipe, model)
    assert len(packed) >= 10
    assert unpacked


@each_mode
def test_context_variables_and_function_modes(mode: str):
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen = []

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is torch.sin else result

    layer = Call(lambda x: seen.append(variable.get()) or torch.sin(x))
    pipe = piped(nn.Sequential(layer, layer.__class__(torch.sin)), [1, 1], chunks=2, checkpoint=mode)
    x = rows(4, grad=True)
    token = variable.set(3)
    with Doubles():
        output = pipe(x)
    variable.reset(token)
    output.sum().backward()
    assert set(seen) == {3}
    inner = 2 * rows(4).sin()
    torch.testing.assert_close(output, 2 * inner.sin())
    torch.testing.assert_close(x.grad, 2 * inner.cos() * 2 * rows(4).cos())

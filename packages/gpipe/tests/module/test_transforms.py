"""Transforms that follow a computation through one thread raise an error, and leave the pipe unchanged."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gpipe import GPipe, inline

from ..layers import assert_trains_like, linears, piped, rows, trained

X = rows()


def dual(of: Callable[[Tensor], Any]) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(of(forward_ad.make_dual(X, X))).tangent


def dual_parameter(of: nn.Module | Callable[[Tensor], Any]) -> Any:
    layer = PIPES[-1][0]
    with forward_ad.dual_level():
        weight = layer.weight
        del layer.weight
        layer.weight = forward_ad.make_dual(weight.detach(), weight.detach())
        try:
            return of(X)
        finally:
            del layer.weight
            layer.weight = weight


PIPES: list[GPipe] = []
TRANSFORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dual input": (dual, "forward_ad"),
    "dual parameter": (dual_parameter, "forward_ad"),
    "jvp": (lambda f: torch.func.jvp(f, (X,), (X,)), r"torch\.func\.jvp"),
    "vjp": (lambda f: torch.func.vjp(f, X), r"torch\.func\.grad"),
    "grad": (lambda f: torch.func.grad(lambda x: f(x).sum())(X), r"torch\.func\.grad"),
    "vmap": (lambda f: torch.func.vmap(f)(X[None]), r"torch\.func\.vmap"),
    "make_fx": (lambda f: make_fx(f)(X), "make_fx"),
    "torch.fx": (torch.fx.symbolic_trace, r"torch\.fx"),
    "jit.trace": (lambda f: torch.jit.trace(f, X), r"torch\.jit\.trace"),
}


# Their own tools warn of each other.
quietly = pytest.mark.filterwarnings("ignore")


@quietly
@pytest.mark.parametrize("by", ["call", "step"])
@pytest.mark.parametrize("where", ["threads", "inline"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_is_refused_by_name(name: str, where: str, by: str) -> None:
    transform, called = TRANSFORMS[name]
    pipe = piped(linears(), [1, 2], chunks=2)
    PIPES[:] = [pipe]
    function = pipe if by == "call" else lambda x: pipe.step(x, X, loss_fn=F.mse_loss)
    with (
        inline() if where == "inline" else nullcontext(),
        pytest.raises(RuntimeError, match=rf"a pipe cannot run inside .*{called}.*plain model: pipe\[:\]"),
    ):
        transform(function)
    assert_trains_like(pipe, linears())


@quietly
@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused_by_name(strict: bool) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    with pytest.raises(RuntimeError, match=r"a pipe (cannot run inside torch.export|runs its stages)"):
        torch.export.export(pipe, (X,), strict=strict)
    assert_trains_like(pipe, linears())


class Around(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.after = linears()[0], middle, linears()[2]

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)).relu())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("wrap", [lambda module: module, Around, lambda module: nn.Sequential(module, nn.Tanh())])
def test_the_compiler_calls_a_pipe_as_it_is(wrap: Callable[[nn.Module], nn.Module], mode: str) -> None:
    """A compiler warning, of something that it cannot trace, would be an error here."""
    torch._dynamo.reset()
    compiled = torch.compile(wrap(piped(linears(), [1, 2], chunks=2, checkpoint=mode)), backend="eager")
    for _ in range(2):
        compiled.zero_grad()
        model, x, y = wrap(linears()), rows(grad=True), rows(grad=True)
        torch.testing.assert_close(trained(compiled, x), trained(model, y))
        found, expected = (
            [leaf.grad, *(p.grad for p in each.parameters())] for each, leaf in ((compiled, x), (model, y))
        )
        torch.testing.assert_close(found, expected)


class Tangent(nn.Linear):
    """A layer whose output is partly its own derivative."""

    def forward(self, x: Tensor) -> Tensor:
        output, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return output + tangent


@quietly
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize(("where", "layers"), [("inline", 3), ("threads", 1)])
def test_forward_mode_inside_of_layers(where: str, layers: int, mode: str) -> None:
    """The layers must run on a single thread, since torch has one stack of levels for all threads."""
    torch.manual_seed(0)
    kinds = [Tangent if j < layers else nn.Linear for j in range(3)]
    plain = nn.Sequential(*(kind(3, 3, dtype=torch.float64) for kind in kinds))
    with inline() if where == "inline" else nullcontext():
        assert_trains_like(piped(plain, [1, 1, 1], chunks=2, checkpoint=mode), plain)


@pytest.mark.parametrize("how", ["call", "step", "evaluate"])
def test_counting_mode_sees_everything_or_raises(how: str) -> None:
    plain = linears()
    pipe = piped(linears(), [1, 2], chunks=3, checkpoint="never")  # a recomputation counts too

    def run(module: nn.Module, counter: FlopCounterMode) -> int:
        with counter:
            if how == "call" or module is plain:
                loss = F.mse_loss(module(X), X)
                if how != "evaluate":
                    loss.backward()
            else:
                getattr(module, how)(X, X, loss_fn=F.mse_loss)
        return counter.get_total_flops()

    with pytest.raises(RuntimeError, match=r"a TorchDispatchMode is active.*gpipe\.inline"):
        run(pipe, FlopCounterMode(display=False))
    with inline():
        assert run(pipe, FlopCounterMode(display=False)) == run(plain, FlopCounterMode(display=False)) > 0

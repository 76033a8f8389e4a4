"""Operations with a generator argument match torch's, but use the cell's numbers; others are left alone."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.library import Library

from gpipe import GPipe
from gpipe._current import doing
from gpipe._torch import set_intercepting
from gpipe.checkpoint._operations import with_generator
from gpipe.checkpoint._random import CellRNG, RunRNG, interception

from ..layers import Call


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_is_that_of_torch(p: float, dtype: torch.dtype) -> None:
    """Torch's own takes no generator."""
    x = torch.linspace(-3, 3, 60, dtype=dtype).view(4, 15).requires_grad_()
    torch.manual_seed(5)
    expected = torch.native_dropout(x, p, True)
    call = with_generator(torch.ops.aten.native_dropout.default)
    assert call is not None
    found = call(x, p, True, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weights = torch.arange(60, dtype=dtype).view(4, 15)
    one, other = (torch.autograd.grad(output, x, weights)[0] for output, _ in (found, expected))
    torch.testing.assert_close(one, other)  # torch multiplies in a different order


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": torch.bernoulli,
    "bernoulli_ of a tensor": lambda p: torch.empty_like(p).bernoulli_(p),
    "dropout": lambda p: nn.functional.dropout(p, 0.3),
    "fused dropout": lambda p: torch.native_dropout(p, 0.3, True)[0],
    "rrelu": lambda p: nn.functional.rrelu(p - 0.5, training=True),
    "attention": lambda p: nn.functional.scaled_dot_product_attention(p, p, p, dropout_p=0.5),
    "rand": lambda p: p * torch.rand(p.shape),
    "randn out": lambda p: torch.randn(p.shape, out=torch.empty(p.shape)),
    "randperm": lambda p: p[torch.randperm(len(p))],
    "multinomial": lambda p: torch.multinomial(p + 0.1, 2).float(),
    "gamma": lambda p: torch.distributions.Gamma(p + 1, 1.0).rsample(),
    "in vmap": lambda p: torch.vmap(lambda row: row * torch.rand(row.shape), randomness="different")(p),
}


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    """Prepare the interception, like the first pipe of a process."""
    interception.prepare()


def drawn(names: list[str], microbatch: int) -> list[Tensor]:
    """Return the result and gradients of a cell that uses these random operations."""
    torch.manual_seed(3)
    p = torch.rand(4, 5, requires_grad=True)
    set_intercepting(True)
    try:
        with doing(rng=CellRNG(RunRNG(), microbatch, 2)):
            found = [DRAWS[name](p) for name in names]
    finally:
        set_intercepting(False)
    total = sum((each.sum() for each in found), p.sum())
    return [*found, *torch.autograd.grad(total, p), torch.get_rng_state()]


@given(st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=4))
def test_the_numbers_are_those_of_the_cell(names: list[str]):
    """torch's generator advances by one number, however many are used."""
    one, same, other = drawn(names, 1), drawn(names, 1), drawn(names, 2)
    torch.testing.assert_close(one, same, rtol=0, atol=0, equal_nan=True)
    assert any(not torch.equal(a, b) for a, b in zip(one[:-2], other[:-2], strict=True))
    torch.manual_seed(3)
    torch.rand(4, 5)
    torch.randint(2**32, ())
    assert torch.equal(torch.get_rng_state(), one[-1])


TAKEN = """
import torch
from torch import nn
library = torch.library.Library("aten", "IMPL", "DeferredInit")
library.impl("relu", lambda x: x)
from gpipe import GPipe
try:
    GPipe(nn.Sequential(nn.Dropout()), [1], devices=["cpu"])
except RuntimeError as error:
    print(error)
"""


def test_pipe_raises_if_dispatch_key_is_taken():
    found = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True, check=True)
    assert "another library has kernels for torch's dispatch key DeferredInit" in found.stdout


@pytest.mark.parametrize("takes", [False, True])
def test_custom_random_operation_needs_generator_argument(takes: bool):
    library = Library(f"gpipe_test_{takes}", "DEF")
    argument = ", *, Generator? generator=None" if takes else ""
    library.define(f"noisy(Tensor x{argument}) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    library.impl("noisy", lambda x, generator=None: x * torch.rand(x.shape, generator=generator), "CPU")
    noisy = getattr(torch.ops, f"gpipe_test_{takes}").noisy
    pipe = GPipe(nn.Sequential(Call(noisy)), [1], devices=["cpu"], chunks=2)
    outputs = []
    with nullcontext() if takes else pytest.raises(RuntimeError, match=r"noisy.* takes no generator"):
        for _ in range(2):
            torch.manual_seed(1)
            outputs.append(pipe(torch.ones(4, 4)))
    assert not takes or torch.equal(*outputs)
    library._destroy()


def test_implemented_but_undefined_operation_is_ignored():
    """optimum-quanto has such operations."""
    library = Library("gpipe_test_undefined", "IMPL")
    library.impl("op", torch.sin, "CPU")
    assert "gpipe_test_undefined::op" in torch._C._dispatch_get_all_op_names()
    with closing(GPipe(nn.Sequential(nn.Dropout(0.5)), [1], devices=["cpu"])) as pipe:
        pipe(torch.ones(2))
    library._destroy()

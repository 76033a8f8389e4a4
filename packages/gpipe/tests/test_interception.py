"""Operations that draw are handed over one by one, and those that do not are left alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gpipe
from gpipe import GPipe
from gpipe.checkpoint import _interception, _random
from gpipe.checkpoint._interception import Interception
from gpipe.checkpoint._random import OUTSIDE, CellRNG, RunRNG

from .layers import Call

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": torch.bernoulli,
    "bernoulli of p": lambda p: torch.bernoulli(p, 0.3),
    "bernoulli_": lambda p: torch.empty_like(p).bernoulli_(0.4),
    "bernoulli_ of a tensor": lambda p: torch.empty_like(p).bernoulli_(p),
    "dropout": lambda p: nn.functional.dropout(p, 0.3),
    "feature dropout": lambda p: nn.functional.dropout1d(p, 0.3),
    "alpha dropout": lambda p: nn.functional.alpha_dropout(p, 0.3, training=True),
    "fused dropout": lambda p: torch.native_dropout(p, 0.3, True)[0],
    "rrelu": lambda p: nn.functional.rrelu(p - 0.5, training=True),
    "attention": lambda p: nn.functional.scaled_dot_product_attention(p, p, p, dropout_p=0.5),
    "rand": lambda p: p * torch.rand(p.shape),
    "rand_like": lambda p: p * torch.rand_like(p),
    "randn out": lambda p: torch.randn(p.shape, out=torch.empty(p.shape)),
    "randint": lambda p: p * torch.randint(9, p.shape),
    "randperm": lambda p: p[torch.randperm(len(p))],
    "normal": lambda p: torch.normal(p, 2.0),
    "multinomial": lambda p: torch.multinomial(p + 0.1, 2).float(),
    "exponential_": lambda p: torch.empty_like(p).exponential_(),
    "gamma": lambda p: torch.distributions.Gamma(p + 1, 1.0).rsample(),
    "poisson": torch.poisson,
    "in vmap": lambda p: torch.vmap(lambda row: row * torch.rand(row.shape), randomness="different")(p),
    "gumbel": lambda p: nn.functional.gumbel_softmax(p),
}


def drawn(names: list[str], *, known: bool) -> tuple[list[Tensor], set[int]]:
    """What a cell gives that draws by these operations, with its gradients, and which layers were seen to draw."""
    torch.manual_seed(3)
    p = torch.rand(4, 5, requires_grad=True)
    cell = CellRNG(RunRNG(), 1, 2, CPU, [OUTSIDE])
    with cell.drawn_from(served=False, known=known):
        assert cell.intercepts == known
        found = [DRAWS[name](p) for name in names]
    total = sum((each.sum() for each in found), p.sum())
    return [*found, *torch.autograd.grad(total, p), torch.get_rng_state()], cell.drew


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=4))
def test_the_numbers_are_those_of_a_mode(names: list[str]):
    """And so are the gradients, what is known of the layers, and the state in which torch's generator is left."""
    one, other = drawn(names, known=False), drawn(names, known=True)
    assert one[1] == other[1]
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_no_mode_is_left_once_it_is_known_which_layers_draw(mode: str, inline: bool):
    depths: list[int] = []

    def look(x: Tensor) -> Tensor:
        depths.append(torch._C._len_torch_dispatch_stack())
        return nn.functional.dropout(x)

    pipe = GPipe(nn.Sequential(Call(look), Call(look)), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    outputs = []
    with gpipe.inline() if inline else nullcontext():
        for run in range(3):
            depths.clear()
            torch.manual_seed(run and 1)
            x = torch.ones(4, 4, requires_grad=True)
            outputs.append(pipe(x))
            outputs[-1].sum().backward()
            assert {*depths} == {int(run == 0)}
            torch.testing.assert_close(x.grad, outputs[-1])
    assert torch.equal(outputs[1], outputs[2])


def test_without_the_key_there_is_a_mode(monkeypatch: pytest.MonkeyPatch):
    """As where another extension of torch has taken it."""
    with_key = drawn(["dropout", "rand"], known=True)
    monkeypatch.setattr(_interception, "_free", lambda: False)
    monkeypatch.setattr(_random, "_interception", Interception(lambda *_: pytest.fail("was handed over")))
    cell = CellRNG(RunRNG(), 0, 0, CPU, [OUTSIDE])
    with cell.drawn_from(served=False, known=True):
        assert not cell.intercepts
        assert cell.watches
    assert drawn(["dropout", "rand"], known=False)[1] == with_key[1]


def test_another_thread_draws_from_torchs_generator():
    """While a layer draws numbers of its own."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    cell = CellRNG(RunRNG(), 0, 0, CPU, [OUTSIDE])
    with cell.drawn_from(served=False, known=True):
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(torch.rand(3)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert not cell.drew


def test_what_is_only_traced_draws_nothing():
    cell = CellRNG(RunRNG(), 0, 0, CPU, [OUTSIDE])
    with cell.drawn_from(served=False, known=True), FakeTensorMode():
        assert nn.functional.dropout(torch.rand(3)).shape == (3,)
    assert not cell.drew


NOISY = """
import torch
from torch import nn
from gpipe import GPipe
from gpipe.checkpoint._random import PROCESS

class Noisy(nn.Module):
    def forward(self, x):
        return torch.ops.gpipe_test.noisy(x)

library = torch.library.Library("gpipe_test", "FRAGMENT")
library.define("noisy(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
library.impl("noisy", lambda x: x * torch.rand(x.shape), "CPU")
pipe = GPipe(nn.Sequential(Noisy()), [1], devices=["cpu"], chunks=2, checkpoint="always")
outputs, states = [], []
for _ in range(4):
    torch.manual_seed(1)
    x = torch.ones(4, 4, requires_grad=True)
    outputs.append(pipe(x))
    outputs[-1].sum().backward()
    states.append(PROCESS.get_state())
print(all(torch.equal(each, outputs[0]) for each in outputs), all(torch.equal(each, states[0]) for each in states))
"""


def test_an_operation_of_somebody_else():
    """Once it was seen to draw it is handed over too, although no operation is in the run that shows it."""
    found = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, timeout=50, check=True)
    assert found.stdout.split() == ["True", "True"]

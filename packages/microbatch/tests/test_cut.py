"""Cutting works under everything that torch.chunk works under."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

from microbatch import scatter

# torch itself warns when it first differentiates in forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

CHUNKS = [1, 3]

ours = [
    lambda t, chunks: [batch.tensor for batch in scatter(t, chunks)],
    lambda t, chunks: [batch.value["x"] for batch in scatter({"x": t}, chunks)],
]


def plain(t: Tensor, chunks: int) -> Any:
    return t.chunk(chunks)


def curved(cut: Any, chunks: Any) -> Callable[[Tensor], Tensor]:
    """Return a function of a tensor whose result depends on the order of its parts."""
    return lambda t: sum(((i + 1) * (part**3).sum() for i, part in enumerate(cut(t, chunks))), torch.zeros(()))


x, xs = torch.arange(4.0), torch.arange(12.0).view(3, 4)

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: func.grad(f)(x),
    "vmap of grad": lambda f: func.vmap(func.grad(f))(xs),
    "jvp": lambda f: func.jvp(f, (x,), (x,)),
    "hessian": lambda f: func.hessian(f)(x),
}


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("cut", ours)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform: Any, cut: Any, chunks: Any) -> None:
    torch.testing.assert_close(transform(curved(cut, chunks)), transform(curved(plain, chunks)))


@pytest.mark.parametrize("cut", ours)
def test_compiled_as_one_graph(cut: Any) -> None:
    chunks = 3
    torch.compiler.reset()
    compiled = torch.compile(curved(cut, chunks), fullgraph=True, backend="aot_eager")
    t, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = compiled(t), curved(plain, chunks)(same)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(t.grad, same.grad)

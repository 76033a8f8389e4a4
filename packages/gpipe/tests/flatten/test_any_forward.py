"""Random forwards: statements over blocks, modules, parameters, buffers and all that was computed before."""

import copy
from collections.abc import Callable
from contextlib import closing

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, flatten

from ..layers import DOUBLE, MODES, gradients

WIDTH = 4


class Any(nn.Module):
    """A model whose forward is ``told``: each statement adds a tensor, made of two that are there."""

    def __init__(self, told: list[tuple[str, int, int]], last: int) -> None:
        super().__init__()
        self.told, self.last = told, last
        self.embed, self.linear, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        for kind in LISTS:
            count = sum(name == kind for name, _, _ in told)
            self.add_module(kind, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("table", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made, blocks = [self.embed(x)], {kind: iter(getattr(self, kind)) for kind in LISTS}
        for name, i, j in self.told:
            a, b = made[i % len(made)], made[j % len(made)]
            made.append(next(blocks[name])(a).tanh() + a if name in blocks else STATEMENTS[name](self, a, b))
        return self.head(made[-1]), made[self.last % len(made)]


LISTS = ("block", "other")


def _overwritten(_: Any, a: Tensor, b: Tensor) -> Tensor:
    found = a * 1
    found[:, 0] = b[:, 1]
    return found


STATEMENTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "add": lambda model, a, b: a + b,
    "gate": lambda model, a, b: a * b.sigmoid(),
    "scale": lambda model, a, b: a * model.scale,
    "element": lambda model, a, b: torch.lerp(a, b, model.scale[0]),
    "buffer": lambda model, a, b: a + model.table,
    "module": lambda model, a, b: model.norm(a),
    "linear": lambda model, a, b: model.linear(a).tanh(),
    "changed": lambda model, a, b: model.linear(a).mul_(2).add_(b),
    "weight": lambda model, a, b: a @ model.linear.weight,
    "detach": lambda model, a, b: a.detach() * b,
    "view": lambda model, a, b: a.view(-1, 2, 2).transpose(1, 2).flatten(1),
    "cat": lambda model, a, b: torch.cat([a[:, :2], b[:, 2:]], -1),
    "in place": lambda model, a, b: a.clone().mul_(2).add_(b),
    "overwritten": _overwritten,
    "size": lambda model, a, b: a / b.shape[-1],
    "mode": lambda model, a, b: a * 2 if model.training else b,
}


def means(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([output.square().mean() for output in outputs]).sum()


NEAR = st.integers(-4, -1) | st.integers(0, 9)
TOLD = st.lists(st.tuples(st.sampled_from([*LISTS, *STATEMENTS]), NEAR, NEAR), min_size=2, max_size=14)


@given(TOLD, NEAR, st.sampled_from(MODES), st.sampled_from(["1f1b", "zero_bubble", "call"]), st.data())
def test_a_forward_is_right_or_refused(
    told: list[tuple[str, int, int]], last: int, mode: str, how: str, data: st.DataObject
) -> None:
    """Most are right: of those that are refused there must not be many."""
    model = Any([("block", 0, 0), *told, ("block", -1, 0)], last).double()
    plain, x = copy.deepcopy(model), torch.randn(5, 2, dtype=DOUBLE)
    try:
        layers = flatten(model, x[:2])
    except ValueError:
        assume(False)
    cut = data.draw(st.integers(1, len(layers) - 1))
    balance = [cut, len(layers) - cut]
    with closing(GPipe(layers, balance, devices=["cpu"] * 2, chunks=2, checkpoint=mode)) as pipe:
        if how == "call":
            means(pipe(x)).backward()
        else:
            pipe.step(x, loss_fn=means, reduction="mean", schedule=how)
    means(plain(x)).backward()
    found, expected = gradients(model), gradients(plain)
    for name in found.keys() | expected.keys():
        zeros = torch.zeros_like(plain.get_parameter(name))  # what is multiplied by nothing has no gradient, or zeros
        a, b = (each[name] if each.get(name) is not None else zeros for each in (found, expected))
        torch.testing.assert_close(a, b)

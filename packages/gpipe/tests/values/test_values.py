"""Values accepted at the input of a pipe, between its stages, and at its output."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..layers import DOUBLE, Call, assert_same, assert_trains_like, each_mode, linear, piped, rows


def number(x: Tensor) -> Tensor:
    return (x.detach()[:, 0] * 3).long()


# How a value is packed between two stages, and taken out again.
PACKINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "integers first": (lambda x: (number(x), x), lambda v: v[1] * v[0][:, None]),
    "constant first": (lambda x: (x.detach() * 2, x), lambda v: v[0] + v[1]),
    "same tensor twice": (lambda x: (x, x), lambda v: v[0] * v[1]),
    "a tensor and its view": (lambda x: (x, x[:, :1]), lambda v: v[0] * v[1]),
    "booleans": (lambda x: (x > 0, x), lambda v: v[1].masked_fill(v[0], 2.0)),
    "complex": (lambda x: torch.complex(x, x * 2), lambda v: v.abs().square()),
    "transposed": (lambda x: x.T.contiguous().T, lambda v: v * 2),
    "expanded": (lambda x: x[:, :1].expand(-1, 3), lambda v: v * 2),
    "unused part": (lambda x: (x, x * 5), lambda v: v[0]),
    "scalars by row": (lambda x: x.sum(1), lambda v: v[:, None].expand(-1, 3) * 2),
}


@each_mode
@pytest.mark.parametrize("name", PACKINGS)
def test_between_stages(name: str, mode: str):
    pack, take = PACKINGS[name]
    model = nn.Sequential(linear(), Call(pack), Call(take), linear())
    for balance in ([2, 2], [1, 1, 1, 1], [3, 1]):
        for grad in (False, True):
            assert_trains_like(piped(model, balance, chunks=3, checkpoint=mode), model, rows(6, grad=grad))


@each_mode
@pytest.mark.parametrize("name", PACKINGS)
def test_out_of_a_pipe_and_into_it(name: str, mode: str):
    """Packed by the last stage, and unpacked by the first one of another pipe."""
    pack, take = PACKINGS[name]
    ends = [nn.Sequential(linear(), Call(pack)), nn.Sequential(Call(take), linear())]
    pipes = [piped(end, [1, 1], chunks=2, checkpoint=mode) for end in ends]
    assert_trains_like(nn.Sequential(*pipes), nn.Sequential(*ends))


@each_mode
def test_tensor_of_outer_graph_is_right_or_raises(mode: str):
    outer = torch.ones(3, dtype=DOUBLE, requires_grad=True)

    def loss(factor: Tensor, module: nn.Module) -> Tensor:
        module[1].function = lambda x: x * factor
        return module(rows()).square().sum()

    model = nn.Sequential(linear(), Call(lambda x: x), linear())
    pipe = piped(model, [1, 1, 1], chunks=2, checkpoint=mode)
    with pytest.raises(RuntimeError, match=r"computed with gradients outside|second time"):
        loss(outer.exp(), pipe).backward()
    pipe.zero_grad()
    found = []
    for module in (model, pipe):
        outer.grad = None
        loss(outer, module).backward()
        found.append(outer.grad)
    torch.testing.assert_close(found[1], found[0])
    assert_same(pipe, model)


def ragged(x: Tensor) -> Tensor:
    """Return one, two or three copies of each row."""
    return torch.nested.as_nested_tensor([row.expand(1 + i % 3, -1) for i, row in enumerate(x)], layout=torch.jagged)


def dense(value: Tensor) -> Tensor:
    return torch.stack([part.sum(0) for part in value.unbind()])


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@each_mode
@pytest.mark.parametrize("balance", [[2, 3], [1, 1, 1, 2]])
def test_nested_tensors_train_like_plain_model(balance: list[int], mode: str, schedule: str):
    plain = nn.Sequential(linear(), Call(ragged), linear(), nn.Tanh(), Call(dense))
    pipe = piped(plain, balance, chunks=2, checkpoint=mode)
    pipe.step(rows(6), rows(6), loss_fn=nn.functional.mse_loss, schedule=schedule)
    nn.functional.mse_loss(torch.cat([plain(part) for part in rows(6).chunk(2)]), rows(6)).backward()
    assert_same(pipe, plain)

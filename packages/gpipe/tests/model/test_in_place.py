"""Tensors modified in place by several stages, and parameters of a different stage next to tied ones."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe

from ..layers import DOUBLE, squares

WIDTH, ROWS = 4, 6


class Model(nn.Module):
    """An embedding and six blocks, with a function applied to each output."""

    def __init__(self, function: Callable[[Tensor, int, Tensor], None]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=DOUBLE) for _ in range(6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).tanh()
        found = h * 1
        for k, block in enumerate(self.blocks):
            h = block(h).tanh()
            self.function(found, k, h)
        return found + h


def add(found: Tensor, k: int, h: Tensor) -> None:
    found.add_(h)


def put(found: Tensor, k: int, h: Tensor) -> None:
    found[:, k % WIDTH] = h.sum(1)


def put_late(found: Tensor, k: int, h: Tensor) -> None:
    if k > 2:
        found[:, k % WIDTH] = h.sum(1)


class Shifted(nn.Module):
    """Has tied weights, and a parameter that each stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=DOUBLE))
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=DOUBLE) for _ in range(6))
        self.blocks[4].weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).tanh() + self.shift
        return F.linear(x, self.embed.weight)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("made", [lambda: Model(add), lambda: Model(put), lambda: Model(put_late), Shifted])
def test_gradients_are_those_of_the_plain_model(made: Callable[[], nn.Module], stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    plain = made()
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * stages, chunks=3)
    x = torch.randn(ROWS, WIDTH, dtype=DOUBLE)
    loss = squares(plain(x))
    loss.backward()
    for _ in range(2):
        pipe.zero_grad()
        torch.testing.assert_close(pipe.step(x, loss_fn=squares, reduction="sum", schedule=schedule), loss.detach())
        torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


class Views(Model):
    """A later stage modifies a view of the first stage's result, and the end uses all of it."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda found, k, h: None)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).tanh() * 1
        view = h[:, :2]
        for k, block in enumerate(self.blocks):
            x = block(x).tanh()
            if k == 4:
                view = self.change(view)
        return h + x + view.sum(1, keepdim=True)


def test_using_other_view_of_changed_tensor_raises() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=DOUBLE)
    pipe = GPipe(Views(lambda view: view.mul_(2)), devices=["cpu"] * 3, chunks=3)
    with pytest.raises(RuntimeError, match="another view of its memory"):
        pipe.step(x, loss_fn=squares, reduction="sum")
    pipe.close()

    model = Views(lambda view: view.clone().mul_(2))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, devices=["cpu"] * 3, chunks=3)
    pipe.step(x, loss_fn=squares, reduction="sum")
    squares(plain(x)).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    pipe.close()

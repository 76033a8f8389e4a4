"""Full-batch outputs have the values that the model uses, whatever it or its blocks do with tensors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

Forward = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.tanh())


class Halving(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) * self.scale


class Maybe(Block):
    """Returns its input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Net(nn.Module):
    def __init__(self, forward: Forward, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds or [Block] * 4)
        self.norm = nn.LayerNorm(4)
        self.act = nn.Tanh()
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def residual(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        before = x
        x = block(x)
        x += before
    return x


def returned_twice(net: Net, x: Tensor) -> Tensor:
    found = [x]
    for block in net.blocks:
        found.append(block(found[-1]))
    return torch.stack(found[1:], 1)


def rows_second(net: Net, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    for block in net.blocks:
        x = block(x)
    return x.transpose(0, 1)


def positions(net: Net, x: Tensor) -> Tensor:
    x = x + net.blocks[0](torch.linspace(-1, 1, x.shape[1])[:, None].expand(1, -1, 4))
    for block in net.blocks[1:]:
        x = block(x)
    return net.norm(x)


def changed_input(net: Net, x: Tensor) -> Tensor:
    x.mul_(2)
    first = x
    for block in net.blocks:
        x = block(x)
    return x + first


def norm_early_and_late(net: Net, x: Tensor) -> Tensor:
    x = net.norm(x)
    for block in net.blocks:
        x = net.act(block(x))
    return net.norm(x)


WAYS: dict[str, tuple[Forward, tuple[type[nn.Module], ...]]] = {
    each.__name__: (each, ()) for each in (residual, rows_second, positions, changed_input, norm_early_and_late)
}
WAYS["returned_twice"] = returned_twice, (Block, Maybe, Block, Maybe)


def spread(output: Tensor) -> Tensor:
    """Compute a loss that mixes rows."""
    return (output - output.mean(0)).square().sum().sqrt()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [6, 7])
def test_it_is_the_output_of_the_plain_model(way: str, rows: int) -> None:
    forward, kinds = WAYS[way]
    torch.manual_seed(0)
    net = Net(forward, *kinds)
    plain = copy.deepcopy(net)
    pipe = GPipe(net, devices=["cpu"] * 3, chunks=3, blocks="blocks")
    for _ in range(2):  # while it is learned what the model uses, and after that
        x = torch.randn(rows, 6, 4)
        for each in (net, plain):
            each.zero_grad()
        expected = plain(x.clone())
        spread(expected).backward()
        torch.testing.assert_close(pipe(x.clone()), expected)
        torch.testing.assert_close(pipe.step(x.clone(), loss_fn=spread), spread(expected).detach())
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_block_modifying_tensor_used_later_raises(checkpoint: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        first = net.blocks[0](x)
        total = first.sum()
        for block in net.blocks[1:]:
            x = block(first)
        return x + first * total

    net = Net(forward, Block, Halving)
    pipe = GPipe(net, devices=["cpu"] * 2, chunks=2, blocks="blocks", checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match=r"block 'blocks\.1' has changed in place.*clone"):
        pipe(torch.randn(4, 4))

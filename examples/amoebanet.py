"""Train a small relative of AmoebaNet, whose cells take the output of the cell before the last one too.

python examples/amoebanet.py
python examples/amoebanet.py --devices cuda:0 cuda:1 cuda:2 cuda:3 --cells 18 --channels 256
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Generator, Sequence

import torch
import torch.nn.functional as F
from _compare import MiniBatch, compare_memory, compare_results, console, draw, isolated, parser
from digits import Digits, accuracy, load, mini_batches
from rich.progress import track
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.balance import balance_by_flops
from gpipe.skip import Namespace, pop, skippable, stash

Skipping = Generator[stash | pop, Tensor, Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.manual_seed(0)
    data, test = load()
    model = amoebanet(options.cells, options.channels)
    plain = copy.deepcopy(model)

    task = MiniBatch(data[0][: options.batch], data[1][: options.batch], F.cross_entropy)
    balance = balance_by_flops(len(options.devices), model, task.inputs[: options.batch // options.chunks])
    console.print(f"{len(model)} layers on {', '.join(options.devices)}: {' + '.join(map(str, balance))}")
    pipe = GPipe(model, balance, devices=options.devices, chunks=options.chunks, checkpoint="never")
    optimizer = fit(pipe, data, options.epochs, options.batch)

    measure = {f"accuracy on {len(test[0])} unseen digits": lambda model: f"{accuracy(model, test):.2%}"}
    compare_results(plain, pipe, task, measure)
    alone = GPipe(copy.deepcopy(plain), [len(plain)], devices=options.devices[:1], checkpoint="never")
    compare_memory(alone, pipe, optimizer, task)
    draw(pipe, task, options.timeline)
    pipe.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, "gpipe-amoebanet.svg", stages=3)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--batch", type=int, default=128, help="digits in a mini-batch")
    options.add_argument("--cells", type=int, default=4)
    options.add_argument("--channels", type=int, default=16, help="of the first half of the cells")
    return options.parse_args(argv)


@skippable(stash=["output"])
class Keep(nn.Module):
    """Stashes a cell's output for the cell after the next one."""

    def forward(self, x: Tensor) -> Skipping:
        yield stash("output", x)
        return x


@skippable(pop=["output"])
class Cell(nn.Module):
    """Convolutions and poolings of the outputs of the last two cells, which may have fewer channels and more pixels."""

    def __init__(self, far: int, near: int, channels: int) -> None:
        super().__init__()
        self.far = convolution(far, channels, (1, 1), stride=channels // far)
        self.near = convolution(near, channels, (1, 1), stride=channels // near)
        self.flat, self.tall = convolution(channels, channels, (1, 7)), convolution(channels, channels, (7, 1))
        self.square = convolution(channels, channels, (3, 3))
        self.join = convolution(4 * channels, channels, (1, 1))

    def forward(self, x: Tensor) -> Skipping:
        earlier = yield pop("output")
        far, near = self.far(earlier), self.near(x)
        first = self.tall(self.flat(far)) + F.max_pool2d(near, 3, stride=1, padding=1)
        second = self.square(near) + F.avg_pool2d(far, 3, stride=1, padding=1)
        output: Tensor = self.join(torch.cat([far, near, first, second], dim=1))
        return output


def convolution(inside: int, outside: int, size: tuple[int, int], stride: int = 1) -> nn.Sequential:
    padding = (size[0] // 2, size[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inside, outside, size, stride, padding, bias=False), nn.GroupNorm(4, outside)
    )


def amoebanet(cells: int, channels: int) -> nn.Sequential:
    """Cells of two sizes; in the second half each way half as many pixels, and twice as many channels.

    Each output has a namespace of its own, since all of them are stashed under one name.
    """
    widths = [channels] * (2 + cells // 2) + [2 * channels] * (cells - cells // 2)
    spaces = [Namespace() for _ in range(cells)]
    layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, padding=1), isolated(Keep(), spaces[0])]
    for k in range(cells):
        if k + 1 < cells:
            layers.append(isolated(Keep(), spaces[k + 1]))
        layers.append(isolated(Cell(*widths[k : k + 3]), spaces[k]))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * 4 * 4, 10))


def fit(pipe: GPipe, digits: Digits, epochs: int, batch: int) -> torch.optim.Optimizer:
    steps = epochs * (len(digits[0]) // batch)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for images, labels in track(mini_batches(digits, epochs, batch), "training", total=steps, console=console):
        optimizer.zero_grad()
        pipe.step(images, labels, loss_fn=F.cross_entropy)
        optimizer.step()
        schedule.step()
    return optimizer


if __name__ == "__main__":
    main()

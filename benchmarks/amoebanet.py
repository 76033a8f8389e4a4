"""AmoebaNet-D, the image classifier that torchgpipe was measured with, written from its description.

Source: Real et al., Regularized Evolution for Image Classifier Architecture Search (arXiv 1802.01548), for the cells;
Kim et al., torchgpipe (arXiv 2004.09910), for a sequence of cells that each take the outputs of the previous two. So
a pair of tensors travels from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]  # the outputs of the last two cells, the latest first
Operation = Callable[[int, int], nn.Module]  # (channels, stride)


def amoebanet(filters: int, repeats: int) -> nn.Sequential:
    """A stem, two reductions, and three groups of `repeats` normal cells with a reduction between them.

    Args:
        filters: channels of a normal cell in the first group; each reduction doubles them, and halves height and width.
    """
    group = [NORMAL] * repeats
    channels = filters // 4
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, 2, padding=1, bias=False), nn.BatchNorm2d(channels))
    layers: list[nn.Module] = [stem]
    before = last = channels
    larger = False
    for kind in (REDUCTION, REDUCTION, *group, REDUCTION, *group, REDUCTION, *group):
        channels *= 2 if kind.halves else 1
        layers.append(Cell(kind, before, last, channels, larger=larger))
        before, last, larger = last, channels * len(kind.joined), kind.halves
    return nn.Sequential(*layers, Classifier(last))


class Cell(nn.Module):
    """Five sums of two operations each, on the outputs of the two cells before and on earlier sums.

    Args:
        before, last: channels of the output of the last cell but one, and of the last cell.
        larger: whether the former has twice the height and width of the latter.
    """

    def __init__(self, kind: Kind, before: int, last: int, channels: int, *, larger: bool) -> None:
        super().__init__()
        self.last = _convolution(last, channels)
        self.before: nn.Module = nn.Identity()
        if larger:
            self.before = Halved(before, channels)
        elif before != channels:
            self.before = _convolution(before, channels)
        self.operations = nn.ModuleList(
            make(channels, 2 if kind.halves and source < 2 else 1) for source, make in kind.operations
        )
        self.sources = [source for source, _ in kind.operations]
        self.joined = kind.joined

    def forward(self, x: Tensor | Pair) -> Pair:
        last, before = x if isinstance(x, tuple) else (x, x)
        states = [self.last(last), self.before(before)]
        steps = list(zip(self.sources, self.operations, strict=True))
        for (i, first), (j, second) in zip(steps[::2], steps[1::2], strict=True):
            states.append(first(states[i]) + second(states[j]))
        return torch.cat([states[k] for k in self.joined], dim=1), last


class Halved(nn.Module):
    """Halve height and width without losing every other pixel: half of the channels sample the odd pixels."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inside, outside // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inside, outside // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        found: Tensor = self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))
        return found


class Classifier(nn.Module):
    """Ten classes from the output of the last cell."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(channels, 10)

    def forward(self, x: Pair) -> Tensor:
        found: Tensor = self.linear(self.pool(x[0]).flatten(1))
        return found


def _convolution(
    inside: int, outside: int, kernel: int | tuple[int, int] = 1, stride: int | tuple[int, int] = 1
) -> nn.Sequential:
    padding = tuple(size // 2 for size in kernel) if isinstance(kernel, tuple) else kernel // 2
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inside, outside, kernel, stride, padding, bias=False), nn.BatchNorm2d(outside)
    )


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Halved(channels, channels)


def average_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def convolution_1x1(channels: int, stride: int) -> nn.Module:
    return _convolution(channels, channels, 1, stride)


def convolution_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _convolution(channels, narrow), _convolution(narrow, narrow, 3, stride), _convolution(narrow, channels)
    )


def convolution_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _convolution(channels, narrow),
        _convolution(narrow, narrow, (1, 7), (1, stride)),
        _convolution(narrow, narrow, (7, 1), (stride, 1)),
        _convolution(narrow, channels),
    )


class Kind(NamedTuple):
    """A kind of cell.

    Attributes:
        operations: pairs of operations, added in pairs. Each names the state it reads (0: the last cell's output,
            1: the previous cell's, 2 to 6: the sums) and the operation.
        joined: the states whose channels together are the output.
        halves: whether the output has half the height and width.
    """

    operations: tuple[tuple[int, Operation], ...]
    joined: tuple[int, ...]
    halves: bool


NORMAL = Kind(
    (
        (1, convolution_1x1),
        (1, max_3x3),
        (1, none),
        (0, convolution_1x7_7x1),
        (0, convolution_1x1),
        (0, convolution_1x7_7x1),
        (2, max_3x3),
        (2, none),
        (1, average_3x3),
        (5, convolution_1x1),
    ),
    joined=(0, 3, 4, 6),
    halves=False,
)
REDUCTION = Kind(
    (
        (0, max_2x2),
        (0, max_3x3),
        (2, none),
        (1, convolution_3x3),
        (2, convolution_1x7_7x1),
        (2, max_3x3),
        (3, none),
        (1, max_2x2),
        (2, average_3x3),
        (3, convolution_1x1),
    ),
    joined=(4, 5, 6),
    halves=True,
)

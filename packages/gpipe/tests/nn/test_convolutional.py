"""Convolutional networks of the shapes that torchvision and timm write them in, as layers of a pipe."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, flatten

from ..layers import gradients, running, trained


def norm(channels: int) -> nn.Module:
    """Not batch norm, whose statistics are those of micro-batches."""
    return nn.GroupNorm(2, channels)


class Basic(nn.Module):
    """A residual block that reuses one activation and, where its shape changes, projects its input."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = norm(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = norm(out)
        self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride), norm(out)) if width != out else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A stem, stages that are Sequentials of blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Basic(4, 4), Basic(4, 4))
        self.layer2 = nn.Sequential(Basic(4, 8, 2), Basic(8, 8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class Tower(nn.Module):
    """timm's ResNetV2 and ConvNeXt: stages that are modules around blocks."""

    class Stage(nn.Module):
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.downsample = nn.Sequential(norm(width), nn.Conv2d(width, out, 2, 2))
            self.blocks = nn.Sequential(*(Basic(out, out) for _ in range(2)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(self.downsample(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 2, 2), norm(4))
        self.stages = nn.Sequential(Tower.Stage(4, 8), Tower.Stage(8, 8))
        self.head = nn.Sequential(OrderedDict(norm=norm(8), flatten=nn.Flatten(), fc=nn.Linear(8 * 4, 5)))

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


@pytest.mark.parametrize(
    ("make", "schedule", "checkpoint", "inline"),
    [(ResNet, "zero_bubble", "never", False), (Tower, "fill_drain", "always", True)],
    ids=["torchvision", "timm"],
)
def test_it_trains_as_the_model_does(
    make: Callable[[], nn.Module], schedule: str, checkpoint: str, inline: bool
) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, 3, 16, 16, dtype=torch.float64)
    plain, layers = copy.deepcopy(model), flatten(model, x[:2])
    third = len(layers) // 3
    balance = [third, third, len(layers) - 2 * third]
    pipe = GPipe(layers, balance, devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    with running(inline):
        torch.testing.assert_close(trained(pipe, x, schedule), trained(plain, x))
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert set(pipe.state_dict()) == set(plain.state_dict())
    pipe.close()

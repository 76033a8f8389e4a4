"""Convolutional networks of the shapes that torchvision and timm write them in, as layers of a pipe."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe import GPipe, flatten

ROWS = 6

pytestmark = pytest.mark.usefixtures("one_thread")


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

    def __init__(self, *depths: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        width = 4
        for k, depth in enumerate(depths):
            out, stride = 4 * 2**k, 1 if k == 0 else 2
            blocks = [Basic(width if n == 0 else out, out, stride if n == 0 else 1) for n in range(depth)]
            setattr(self, f"layer{k + 1}", nn.Sequential(*blocks))
            width = out
        self.depths = depths
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for k in range(len(self.depths)):
            x = getattr(self, f"layer{k + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def activated(width: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, out, 3, stride, 1), norm(out), nn.ReLU6(inplace=True))


class Features(nn.Module):
    """One Sequential of layers of all kinds, and a classifier: as VGG and EfficientNet are."""

    def __init__(self, *features: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


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


class UNet(nn.Module):
    """Lists of blocks down and up, and at each level a skip to the other side."""

    class Up(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.conv = nn.ConvTranspose2d(2 * width, width, 2, stride=2), activated(2 * width, width)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.conv(torch.cat([self.up(x), skip], dim=1))

    def __init__(self) -> None:
        super().__init__()
        self.inc = activated(3, 4)
        self.downs = nn.ModuleList(activated(width, 2 * width, 2) for width in (4, 8, 16))
        self.ups = nn.ModuleList(UNet.Up(width) for width in (16, 8, 4))
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inc(x)
        skips = [x]
        for down in self.downs:
            x = down(x)
            skips.append(x)
        for up, skip in zip(self.ups, reversed(skips[:-1]), strict=True):
            x = up(x, skip)
        return self.outc(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet(2, 2, 2),
    "efficientnet": lambda: Features(activated(3, 4), nn.Sequential(Basic(4, 4), Basic(4, 4)), activated(4, 8)),
    "timm": Tower,
    "u-net": UNet,
}


def pictures(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, copy.deepcopy(model)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("schedule", "checkpoint", "inline"), [("fill_drain", "always", True), ("zero_bubble", "never", False)]
)
def test_it_trains_as_the_model_does(name: str, schedule: str, checkpoint: str, inline: bool) -> None:
    model, plain = pair(name)
    layers = flatten(model, pictures(2))
    third = len(layers) // 3
    balance = [third, third, len(layers) - 2 * third]
    pipe = GPipe(layers, balance, devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    with gpipe.inline() if inline else nullcontext():
        pipe.step(pictures(), loss_fn=lambda output, _: output.square().mean(), schedule=schedule)
    plain(pictures()).square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert set(pipe.state_dict()) == set(plain.state_dict())
    pipe.close()

"""Take the noise off a photograph with a U-Net, whose skip connections cross its stages.

python examples/unet.py
python examples/unet.py --devices cuda:0 cuda:1 cuda:2 --channels 64 --steps 2000
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Generator, Sequence

import torch
import torch.nn.functional as F
from _compare import MiniBatch, compare_memory, compare_results, console, draw, isolated, parser
from rich.progress import track
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.balance import balance_by_flops
from gpipe.skip import Namespace, pop, skippable, stash

NOISE = 0.1  # standard deviation; black is 0 and white is 1

Skipping = Generator[stash | pop, Tensor, Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.manual_seed(0)
    temple, flower = photograph("china.jpg"), photograph("flower.jpg")  # to train with, and to test with
    model = unet(options.channels, options.levels)
    plain = copy.deepcopy(model)

    clean = crops(temple, options.batch, options.size)
    task = MiniBatch(noisy(clean), clean, F.mse_loss)
    balance = balance_by_flops(len(options.devices), model, task.inputs[: options.batch // options.chunks])
    console.print(f"{len(model)} layers on {', '.join(options.devices)}: {' + '.join(map(str, balance))}")
    pipe = GPipe(model, balance, devices=options.devices, chunks=options.chunks, checkpoint="never")
    optimizer = fit(pipe, temple, options)

    spoilt = noisy(flower)
    console.print(f"An unseen photograph with noise has a PSNR of {psnr(spoilt, flower)}.\n")
    compare_results(plain, pipe, task, {"PSNR without noise": lambda model: psnr(restored(model, spoilt), flower)})
    alone = GPipe(copy.deepcopy(plain), [len(plain)], devices=options.devices[:1], checkpoint="never")
    compare_memory(alone, pipe, optimizer, task)
    draw(pipe, task, options.timeline)
    pipe.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, "gpipe-unet.svg", stages=3)
    options.add_argument("--steps", type=int, default=120, help="of the optimizer")
    options.add_argument("--batch", type=int, default=16, help="crops in a mini-batch")
    options.add_argument("--size", type=int, default=48, help="pixels of a crop, each way")
    options.add_argument(
        "--channels", type=int, default=12, help="channels of the first level, doubled on each further level"
    )
    options.add_argument("--levels", type=int, default=3, help="how often the picture is made smaller")
    return options.parse_args(argv)


def convolutions(inside: int, outside: int) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.GELU(), nn.Conv2d(outside, outside, 3, padding=1), nn.GELU()
    )
    for layer in list(layers)[::2]:
        nn.init.kaiming_normal_(layer.get_parameter("weight"))  # or the noise is scaled down from layer to layer
    return layers


@skippable(stash=["picture"])
class Keep(nn.Module):
    """Stashes the picture for the last layer."""

    def forward(self, x: Tensor) -> Skipping:
        yield stash("picture", x)
        return x


@skippable(pop=["picture"])
class Subtract(nn.Module):
    """Subtract the noise, found by the previous layers, from the picture."""

    def forward(self, x: Tensor) -> Skipping:
        picture = yield pop("picture")
        return picture - x


@skippable(stash=["skip"])
class Down(nn.Module):
    """Convolutions, whose output skips to an `Up`, and half as many pixels each way."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = convolutions(inside, outside)

    def forward(self, x: Tensor) -> Skipping:
        x = self.body(x)
        yield stash("skip", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["skip"])
class Up(nn.Module):
    """Double height and width, and convolve the result with the features stashed by its `Down`."""

    def __init__(self, inside: int, skipped: int, outside: int) -> None:
        super().__init__()
        self.body = convolutions(inside + skipped, outside)

    def forward(self, x: Tensor) -> Skipping:
        skip = yield pop("skip")
        x = F.interpolate(x, scale_factor=2)
        output: Tensor = self.body(torch.cat([x, skip], dim=1))
        return output


def unet(channels: int, levels: int) -> nn.Sequential:
    """Levels down and up again. Each pair has a namespace of its own, since all their skips have one name."""
    down, up = list[nn.Module](), list[nn.Module]()
    inside = 3
    for level in range(levels):
        space, width = Namespace(), channels * 2**level
        down.append(isolated(Down(inside, width), space))
        up.append(isolated(Up(2 * width, width, width), space))
        inside = width
    bottom = convolutions(inside, 2 * inside)
    return nn.Sequential(Keep(), *down, bottom, *reversed(up), nn.Conv2d(channels, 3, 1), Subtract())


def photograph(name: str) -> Tensor:
    """A photograph that scikit-learn brings, of shape (1, 3, 416, 640), from 0 to 1."""
    pixels = torch.tensor(load_sample_image(name)[:416], dtype=torch.float32)
    return pixels.permute(2, 0, 1).unsqueeze(0) / 255


def crops(picture: Tensor, count: int, size: int) -> Tensor:
    """Squares of the picture, from anywhere."""
    tops = torch.randint(picture.shape[2] - size + 1, (count,)).tolist()
    lefts = torch.randint(picture.shape[3] - size + 1, (count,)).tolist()
    places = zip(tops, lefts, strict=True)
    return torch.cat([picture[:, :, top : top + size, left : left + size] for top, left in places])


def noisy(picture: Tensor) -> Tensor:
    return picture + NOISE * torch.randn_like(picture)


def fit(pipe: GPipe, picture: Tensor, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Train by 1F1B; `step` goes forward and backward."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=options.steps)
    for _ in track(range(options.steps), "training", console=console):
        clean = crops(picture, options.batch, options.size)
        optimizer.zero_grad()
        pipe.step(noisy(clean), clean, loss_fn=F.mse_loss)
        optimizer.step()
        schedule.step()
    return optimizer


@torch.no_grad()
def restored(model: nn.Module, spoilt: Tensor) -> Tensor:
    model.eval()
    output: Tensor = model(spoilt)
    model.train()
    return output.cpu()


def psnr(picture: Tensor, clean: Tensor) -> str:
    """Peak signal-to-noise ratio: 10 dB more is a tenth of the squared error."""
    return f"{-10 * F.mse_loss(picture, clean).log10().item():.2f} dB"


if __name__ == "__main__":
    main()

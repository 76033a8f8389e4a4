"""The models that plans are tried on, beside those that libraries are compared by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe import skip

from .workloads import WORKLOADS, Block, Residual


class Case(NamedTuple):
    """A model, a mini-batch with its target, and a loss."""

    model: nn.Sequential
    x: Tensor
    y: Tensor | None
    loss: Callable[[Any, Any], Tensor]


class Recurrent(nn.Module):
    """An LSTM that gives its outputs alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)[0]
        return output


class Words(nn.Module):
    """Embeddings of characters and of their places."""

    def __init__(self, characters: int, length: int, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.characters(x) + self.places.weight[: x.shape[1]]
        return output


def mlp(width: int = 768, rows: int = 512) -> Case:
    """With an output, and so a loss, much wider than what is between."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    return Case(nn.Sequential(*layers, nn.Linear(width, 4000)), torch.randn(rows, width), None, _squares)


def digits(channels: int = 32, rows: int = 256) -> Case:
    """A residual CNN on the handwritten digits of scikit-learn."""
    from sklearn.datasets import load_digits

    pictures, names = load_digits(return_X_y=True)
    x = torch.tensor(pictures[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    blocks = [Residual(channels, channels, 1) for _ in range(4)] + [Residual(channels, 2 * channels, 2)]
    first = nn.Conv2d(1, channels, 3, padding=1)
    model = nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, 10))
    return Case(model, x, torch.tensor(names[:rows]), functional.cross_entropy)


def unet() -> Case:
    """With three skips."""
    workload = WORKLOADS["U-Net"]
    return Case(workload.model(skip), workload.batch().detach(), None, _squares)


def gpt2(width: int = 192, blocks: int = 6, rows: int = 16, length: int = 64) -> Case:
    """GPT-2 from a config, on the text of Python's own help."""
    from pydoc_data.topics import topics

    from transformers import GPT2Config

    config = GPT2Config(n_embd=width, n_head=width // 64, n_layer=blocks, attn_implementation="sdpa")
    text = torch.tensor(list("".join(topics.values()).encode()[: rows * (length + 1)])).view(rows, length + 1)
    stack = [Block(config, k) for k in range(blocks)]
    model = nn.Sequential(Words(256, length, width), *stack, nn.LayerNorm(width), nn.Linear(width, 256))
    return Case(model, text[:, :-1].contiguous(), text[:, 1:].contiguous(), _next)


def tagger(width: int = 192, rows: int = 64, length: int = 48) -> Case:
    """An LSTM that gives each word one of forty tags."""
    layers = [nn.Embedding(5000, width), *(Recurrent(width) for _ in range(4)), nn.Linear(width, 40)]
    x, y = torch.randint(5000, (rows, length)), torch.randint(40, (rows, length))
    return Case(nn.Sequential(*layers), x, y, _next)


def uneven(channels: int = 16, rows: int = 64, pixels: int = 32) -> Case:
    """A CNN whose first layers have most of the operations, and whose last ones have most of the parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 5, padding=2),
    ]
    layers += [nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(channels, 4 * channels, 3, padding=1), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(4 * channels * (pixels // 4) ** 2, 256), nn.ReLU(), nn.Linear(256, 10)]
    return Case(
        nn.Sequential(*layers),
        torch.rand(rows, 3, pixels, pixels),
        torch.randint(10, (rows,)),
        functional.cross_entropy,
    )


def _squares(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def _next(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


SIX: dict[str, Callable[[], Case]] = {
    "MLP with a large loss": mlp,
    "residual CNN on digits": digits,
    "U-Net": unet,
    "GPT-2": gpt2,
    "LSTM tagger": tagger,
    "uneven CNN": uneven,
}
SMALL: dict[str, Callable[[], Case]] = {
    "MLP": lambda: _fewer(mlp(256, 128), 6),
    "LSTM tagger": lambda: tagger(64, 32, 24),
    "uneven CNN": lambda: uneven(8, 32),
}
"""Those of which every way to train is run."""


def _fewer(case: Case, layers: int) -> Case:
    return case._replace(model=case.model[-layers:])

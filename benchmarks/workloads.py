"""Models that are the same in every library, models for plans, and their batches.

Each model is an `nn.Sequential`. If it has skip connections, their vocabulary (`skippable`, `stash`, `pop`) is a
module of the library under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe import skip

from .amoebanet import amoebanet

Skips = Any  # a module with skippable, stash and pop


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        loss: returns the loss of a micro-batch; the losses add up to the mini-batch's loss.
        balance: makes two stages of about the same weight.
        quarters: makes four, where the model can be cut like that.
        even: makes two stages with the same number of layers, if `balance` does not.
        random: whether the model draws masks, so that gradients differ from run to run.
        has_batch_norm: whether the function computed depends on the split into micro-batches.
    """

    model: Callable[[Skips], nn.Sequential]
    batch: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor]
    balance: tuple[int, int]
    quarters: tuple[int, int, int, int] | None = None
    even: tuple[int, int] | None = None
    random: bool = False
    has_batch_norm: bool = False


def by_name(name: str) -> Workload:
    """The workload of this name.

    Raises:
        ValueError: if there is no such workload; the message lists the valid names.
    """
    try:
        return {**WORKLOADS, **OF_RANKS}[name]
    except KeyError:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}; got {name!r}") from None


def total(output: Tensor) -> Tensor:
    return output.sum()


def half_of_squares(output: Tensor) -> Tensor:
    return output.square().sum() / 2


def linear(width: int, _: Skips) -> nn.Sequential:
    """W: eight blocks, as wide as the batch is long."""
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())])


def w(width: int) -> Workload:
    def batch() -> Tensor:
        # The input requires grad, so that both stages compute the same amount.
        return torch.randn(width, width, requires_grad=True)

    return Workload(partial(linear, width), batch, total, (8, 8), (4, 4, 4, 4))


def narrowing(_: Skips) -> nn.Sequential:
    """Return W with four wide and twelve narrow blocks: most of the work is in the first quarter of the layers."""
    widths = [512] * 5 + [128] * 12
    return nn.Sequential(*[layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())])


def unet(channels: int, depth: int, skips: Skips) -> nn.Sequential:
    """`depth` levels down and up again, with a skip connection from each level's way down to its way up."""
    widths = [3, *(channels * 2**k for k in range(depth))]
    down = [_down(skips, f"level{k}", _convolutions(*pair)) for k, pair in enumerate(pairwise(widths))]
    bottom = _convolutions(widths[-1], widths[-1])
    up = [
        _up(skips, f"level{k}", _convolutions(2 * widths[k + 1], max(widths[k], channels)))
        for k in reversed(range(depth))
    ]
    return nn.Sequential(*down, bottom, *up, nn.Conv2d(channels, 1, 1))


def _down(skips: Skips, name: str, convolutions: nn.Module) -> nn.Module:
    @skips.skippable(stash=[name])
    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = convolutions
            self.shrink = nn.MaxPool2d(2)

        def forward(self, x: Tensor) -> Any:
            x = self.convolutions(x)
            yield skips.stash(name, x)
            return self.shrink(x)

    return Down()


def _up(skips: Skips, name: str, convolutions: nn.Module) -> nn.Module:
    @skips.skippable(pop=[name])
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = convolutions
            self.grow = nn.Upsample(scale_factor=2)

        def forward(self, x: Tensor) -> Any:
            skip = yield skips.pop(name)
            return self.convolutions(torch.cat([self.grow(x), skip], dim=1))

    return Up()


def _convolutions(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.GELU(), nn.Conv2d(outside, outside, 3, padding=1), nn.GELU()
    )


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut; the ReLUs are in-place."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def resnet(channels: int, _: Skips) -> nn.Sequential:
    """Four groups of two blocks; from group to group half as many pixels, twice as many channels."""
    # No bias before a batch norm: its gradient is zero but for rounding, which depends on the number of threads.
    first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    for inside, outside in pairwise([channels, channels, 2 * channels, 4 * channels, 8 * channels]):
        layers += [Residual(inside, outside, 1 if inside == outside else 2), Residual(outside, outside, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * channels, 10))


class Block(nn.Module):
    """A block of GPT-2 that takes a tensor and gives one."""

    def __init__(self, config: Any, k: int) -> None:
        super().__init__()
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        self.block = GPT2Block(config, layer_idx=k)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out if isinstance(out, Tensor) else out[0]


def gpt2(width: int, blocks: int, _: Skips) -> nn.Sequential:
    """A stack of GPT-2's blocks with its dropout, between a layer norm and a linear head."""
    from transformers import GPT2Config

    config = GPT2Config(n_embd=width, n_head=width // 64, n_layer=blocks, attn_implementation="sdpa")
    stack = [Block(config, k) for k in range(blocks)]
    return nn.Sequential(nn.LayerNorm(width), *stack, nn.Linear(width, width))


class LlamaBlock(nn.Module):
    """A block of Llama that maps a tensor to a tensor, with its own rotary embeddings."""

    def __init__(self, config: Any, k: int, length: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        self.block = LlamaDecoderLayer(config, layer_idx=k)
        cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(length)[None])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x, position_embeddings=(self.cos, self.sin))
        return out


def llama(width: int, blocks: int, length: int, _: Skips) -> nn.Sequential:
    """A stack of Llama's blocks below its norm and a linear head."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = llama_config(width, blocks)
    stack = [LlamaBlock(config, k, length) for k in range(blocks)]
    return nn.Sequential(*stack, LlamaRMSNorm(width), nn.Linear(width, width, bias=False))


def llama_config(width: int, blocks: int) -> Any:
    """Return a Llama configuration: 512 words and, as in large ones, an intermediate size of 2.7 times the width."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        use_cache=False,
        attn_implementation="sdpa",
    )


WORKLOADS = {
    "W 64": w(64),
    "W 256": w(256),
    "W 1024": w(1024),
    "U-Net": Workload(
        partial(unet, 16, 3), lambda: torch.rand(32, 3, 48, 48, requires_grad=True), half_of_squares, balance=(4, 4)
    ),
    "ResNet": Workload(
        partial(resnet, 16),
        lambda: torch.rand(64, 3, 32, 32, requires_grad=True),
        half_of_squares,
        balance=(6, 8),
        has_batch_norm=True,
    ),
    "AmoebaNet-D": Workload(
        lambda _: amoebanet(filters=48, repeats=1),
        lambda: torch.rand(32, 3, 64, 64, requires_grad=True),
        half_of_squares,
        balance=(4, 5),
        has_batch_norm=True,
    ),
    "GPT-2": Workload(
        partial(gpt2, 256, 8),
        lambda: torch.randn(8, 64, 256, requires_grad=True),
        half_of_squares,
        balance=(5, 5),
        quarters=(3, 2, 2, 3),
        random=True,
    ),
    "Llama": Workload(
        partial(llama, 256, 4, 64),
        lambda: torch.randn(8, 64, 256, requires_grad=True),
        half_of_squares,
        balance=(2, 4),
        quarters=(1, 1, 1, 3),
    ),
}

OF_RANKS = {
    "W 512": w(512),
    "Uneven": Workload(
        narrowing, lambda: torch.randn(512, 512, requires_grad=True), total, balance=(4, 28), even=(16, 16)
    ),
}
"""Measured by the part `ranks` alone."""


class Case(NamedTuple):
    """A model to plan for, a mini-batch with its target, and a loss."""

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
    """Return a case whose output, and so its loss, is much wider than the hidden layers."""
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


def skipping() -> Case:
    """With three skips."""
    workload = WORKLOADS["U-Net"]
    return Case(workload.model(skip), workload.batch().detach(), None, _squares)


def language_model(width: int = 192, blocks: int = 6, rows: int = 16, length: int = 64) -> Case:
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


def wide_and_narrow(rows: int = 128) -> Case:
    """Layers of very different costs next to each other."""
    widths = [128, 512, 64, 512, 64, 256]
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return Case(nn.Sequential(*layers), torch.randn(rows, widths[0]), None, _squares)


def _squares(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def _next(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


CASES: dict[str, Callable[[], Case]] = {
    "MLP with a large loss": mlp,
    "residual CNN on digits": digits,
    "U-Net": skipping,
    "GPT-2": language_model,
    "LSTM tagger": tagger,
    "uneven CNN": uneven,
}
SMALL_CASES: dict[str, Callable[[], Case]] = {
    "MLP": lambda: _fewer(mlp(256, 128), 6),
    "LSTM tagger": lambda: tagger(64, 32, 24),
    "uneven CNN": lambda: uneven(8, 32),
    "residual CNN": lambda: digits(16, 64),
    "GPT-2": lambda: language_model(64, 4, 8, 32),
    "MLP, wide and narrow": wide_and_narrow,
}
"""Cases small enough to run every candidate."""


def _fewer(case: Case, layers: int) -> Case:
    return case._replace(model=case.model[-layers:])

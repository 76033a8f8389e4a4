"""A loss computed once on the full batch, a call and 1F1B, for a language model with a vocabulary of 32,000."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe import GPipe, LossSum

from .common import head, peak, row, seconds, two_devices

VOCABULARY = 32_000


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counted(logits: Tensor, labels: Tensor) -> LossSum:
    return LossSum(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel())


def called(pipe: GPipe, tokens: Tensor, labels: Tensor) -> None:
    mean(pipe(tokens), labels).backward()


WAYS: dict[str, Callable[[GPipe, Tensor, Tensor], object]] = {
    "pipe(x), backward()": called,
    "step, computed once": lambda pipe, tokens, labels: pipe.step(tokens, labels, loss_fn=mean),
    "step, LossSum (1F1B)": lambda pipe, tokens, labels: pipe.step(tokens, labels, loss_fn=counted),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    devices = two_devices()
    torch.manual_seed(0)
    tokens, labels = torch.randint(VOCABULARY, (2, options.rows, options.tokens))
    head("micro-batches", "way", "ms", "MiB above parameters and gradients")
    for chunks in (2, 4, 8, 16):
        pipe = GPipe(_model(options.width), [4, 2], devices=devices, chunks=chunks, checkpoint="except_last")
        for way, train in WAYS.items():
            work = partial(train, pipe, tokens.to(devices[0]), labels.to(devices[1]))
            took = seconds(work, devices, options.steps)
            row(chunks, way, f"{took * 1e3:.1f}", peak(devices, work))
        pipe.close()


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


if __name__ == "__main__":
    main()

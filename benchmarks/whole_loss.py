"""A loss computed once, on the full batch's outputs, compared with the other two ways to train with it.

A language model with a vocabulary of 32,000, so that its logits are larger than everything else. The same mean over
tokens is trained in three ways: `pipe(x)` and the caller's `backward()`; `step` with a function that nothing is
declared about, which is called once; and `step` with a function that returns a `LossSum`, which is called once per
micro-batch (1F1B). Bytes are counted by the profiler's tracker in an inline step. Steps are timed in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe import GPipe, LossSum
from profiler import AllocationTracker

from .report import Report, Table

VOCABULARY, WIDTH, TOKENS, ROWS, BLOCKS, CHUNKS = 32_000, 128, 64, 16, 4, (2, 4, 8, 16)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counted(logits: Tensor, labels: Tensor) -> LossSum:
    return LossSum(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel())


def called(pipe: GPipe, tokens: Tensor, labels: Tensor) -> None:
    mean(pipe(tokens), labels).backward()


WAYS: dict[str, Callable[[GPipe, Tensor, Tensor], object]] = {
    "`pipe(x)`, `backward()`": called,
    "`step`, computed once": lambda pipe, tokens, labels: pipe.step(tokens, labels, loss_fn=mean),
    "`step`, `LossSum` (1F1B)": lambda pipe, tokens, labels: pipe.step(tokens, labels, loss_fn=counted),
}


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Peak bytes and time of a step by each way, for some numbers of micro-batches."""
    rounds = options.rounds or (2 if options.quick else 11)
    chunks = CHUNKS[:1] if options.quick else CHUNKS
    logits = ROWS * TOKENS * VOCABULARY * 4 / 2**20
    caption = (
        f"{BLOCKS} blocks of width {WIDTH} in two stages, {ROWS} rows of {TOKENS} tokens, {VOCABULARY} words: logits "
        f"of {logits:.0f} MiB. The most MiB of a step, and its time / that of `pipe(x)` and `backward()` (medians "
        f"of {rounds} rounds in turns)"
    )
    table = Table(
        "../howto/losses.md",
        "loss-memory",
        caption,
        ("way", *(f"m={m}" for m in chunks), *(f"time, m={m}" for m in chunks)),
    )
    peaks, ratios = {m: _peaks(m) for m in chunks}, {m: _ratios(m, rounds) for m in chunks}
    for way in WAYS:
        table.add(way, *(f"{peaks[m][way] / 2**20:.0f}" for m in chunks), *(f"{ratios[m][way]:.2f}" for m in chunks))
    yield Report([table])


def _pipe(chunks: int) -> tuple[GPipe, Tensor, Tensor]:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    tokens, labels = torch.randint(VOCABULARY, (2, ROWS, TOKENS))
    return GPipe(model, [4, 2], devices=["cpu"] * 2, chunks=chunks, checkpoint="except_last"), tokens, labels


def _peaks(chunks: int) -> dict[str, int]:
    pipe, *batch = _pipe(chunks)
    found = {}
    with gpipe.inline():
        for way, train in WAYS.items():
            train(pipe, *batch)  # allocates gradients and other one-time memory
            with AllocationTracker() as tracker:
                train(pipe, *batch)
            found[way] = tracker.peak
    return found


def _ratios(chunks: int, rounds: int) -> dict[str, float]:
    pipe, *batch = _pipe(chunks)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, train in WAYS.items():
            begin = time.perf_counter()
            train(pipe, *batch)
            if number:  # the first round warms up
                seconds[way].append(time.perf_counter() - begin)
    pipe.close()
    first = next(iter(WAYS))
    return {way: median(a / b for a, b in zip(own, seconds[first], strict=True)) for way, own in seconds.items()}

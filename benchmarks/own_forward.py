"""A model whose own forward runs in a pipe, compared with a plain loop over micro-batches.

GPT-2, Llama and T5 of transformers, and a U-Net of 50 parts with residuals between them. Measures interleaved steps in
two stages and eight micro-batches, and the time to create each pipe.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe import GPipe

from .report import Report, Table

CHUNKS, ROWS, TOKENS, WORDS = 8, 16, 32, 1000
Batch = dict[str, Tensor]


class UNet(nn.Module):
    """Levels down and up, each with a residual; a level up gets what the same level down has left."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(width, width) for _ in range(levels)) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x)) * 0.5 + x
            kept.append(x)
        for layer in self.up:
            x = layer(x + kept.pop()).tanh() + x
        return F.mse_loss(self.head(x)[:, 0], y)


def models() -> dict[str, Callable[[], tuple[Any, Batch]]]:
    """Return, by name, functions that create a model and a batch with labels."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    words = torch.randint(WORDS, (ROWS, TOKENS))
    batch = {"input_ids": words, "labels": words}
    gpt2 = GPT2Config(
        vocab_size=WORDS, n_layer=8, n_embd=128, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    llama = LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4
    )
    t5 = T5Config(
        vocab_size=WORDS,
        d_model=128,
        d_ff=256,
        num_layers=4,
        num_heads=4,
        d_kv=32,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    x, y = torch.randn(ROWS * TOKENS, 128), torch.randn(ROWS * TOKENS)
    return {
        "GPT-2": lambda: (GPT2LMHeadModel(gpt2), batch),
        "Llama": lambda: (LlamaForCausalLM(llama), batch),
        "T5": lambda: (T5ForConditionalGeneration(t5), batch),
        "U-Net of 50 parts": lambda: (UNet(25, 128), {"x": x, "y": y}),
    }


def run(options: argparse.Namespace) -> Iterator[Report]:
    """The time of a step and of making a pipe, by each way."""
    logging.getLogger("gpipe").setLevel(logging.ERROR)
    rounds = options.rounds or (2 if options.quick else 11)
    caption = (
        f"two stages on the CPU, m={CHUNKS}, {ROWS} rows; time of a step / that of a plain loop over micro-batches "
        f"(medians of {rounds} rounds in turns, in brackets the quartiles), and seconds to make the pipe"
    )
    header = ("model", "way", "schedule", "step / loop", "seconds to make")
    table = Table("models.md", "own-forward", caption, header)
    for name, make in models().items():
        torch.manual_seed(0)
        model, batch = make()
        steps, seconds = _ways(model, batch)
        for (way, schedule), ratios in _ratios(steps, rounds).items():
            first, _, third = quantiles(ratios, n=4)
            table.add(name, way, schedule, f"{median(ratios):.2f} [{first:.2f}–{third:.2f}]", f"{seconds[way]:.2f}")
    yield Report([table])


Way = tuple[str, str]


def _ways(model: Any, batch: Batch) -> tuple[dict[Way, Callable[[], object]], dict[str, float]]:
    seconds = {"loop": 0.0}

    def made(way: str) -> GPipe:
        begin = time.perf_counter()
        pipe = GPipe(copy.deepcopy(model), devices=["cpu"] * 2, chunks=CHUNKS, checkpoint="never")
        seconds[way] = time.perf_counter() - begin
        return pipe

    def loop() -> None:
        for parts in zip(*[rows.chunk(CHUNKS) for rows in batch.values()], strict=True):
            found = plain(**dict(zip(batch, parts, strict=True)))
            ((found if isinstance(found, Tensor) else found.loss) / CHUNKS).backward()

    plain, own = copy.deepcopy(model), made("own forward")
    return {
        ("loop", ""): loop,
        ("own forward", "1f1b"): lambda: own.step(**batch, reduction="mean"),
        ("own forward", "fill_drain"): lambda: own.step(**batch),
    }, seconds


def _ratios(steps: dict[Way, Callable[[], object]], rounds: int) -> dict[Way, list[float]]:
    seconds: dict[Way, list[float]] = {way: [] for way in steps}
    for number in range(rounds + 2):
        for way, step in steps.items():
            begin = time.perf_counter()
            step()
            if number > 1:  # the first rounds warm up
                seconds[way].append(time.perf_counter() - begin)
    first = next(iter(steps))
    return {way: [a / b for a, b in zip(own, seconds[first], strict=True)] for way, own in seconds.items()}

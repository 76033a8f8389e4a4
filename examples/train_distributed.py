"""Train one language model three ways, with the same losses: plain, in a pipeline, and in a process for each stage.

python examples/train_distributed.py --plain
python examples/train_distributed.py
torchrun --nproc-per-node 2 examples/train_distributed.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from finetune import batch_of, blocks, language_model, mini_batch, tokenizer_for
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.utils import logging

from gpipe import GPipe, record
from gpipe.distributed import Rank

console = Console(quiet=int(os.environ.get("RANK", 0)) > 0)

WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""A mini-batch and its micro-batches would have different masks."""

Step = Callable[[dict[str, Tensor]], Tensor]
"""Forward and backward of a mini-batch; its loss."""


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(argv)
    logging.set_verbosity_error()
    torch.manual_seed(0)  # the same weights in all processes
    text = " ".join(" ".join(topics.values()).split())  # what help("for") and the like print: 420 kB of English
    train, _ = blocks(tokenizer_for(text, options.vocabulary), text, options.length)
    model = language_model(options, **WITHOUT_DROPOUT).train()
    name, module, step = trained_by(options, model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses, begin = [], time.perf_counter()
    for k in range(options.steps):
        optimizer.zero_grad()
        losses.append(step(batch_of(mini_batch(train, options.batch, k))).item())
        optimizer.step()
    show(name, losses, time.perf_counter() - begin, sum(p.numel() for p in module.parameters()))
    if options.timeline:
        draw(step, batch_of(mini_batch(train, options.batch, 0)), options.timeline)
    return losses


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="train the model itself")
    parser.add_argument("--stages", type=int, default=2, help="stages of a pipeline; at least as many as processes")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--timeline", type=Path, help="where to save the drawing of a step: .svg or .html")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches a mini-batch is cut into")
    parser.add_argument("--batch", type=int, default=16, help="blocks of text in a mini-batch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a block")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens there are")
    parser.add_argument("--width", type=int, default=128, help="of the hidden state")
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args(argv)


def trained_by(options: argparse.Namespace, model: GPT2LMHeadModel) -> tuple[str, nn.Module, Step]:
    """Return the name of the training, the module with the parameters, and its step."""
    if options.plain:
        return "the plain model", model, lambda batch: plain_step(model, batch)
    if "RANK" not in os.environ:
        pipe = GPipe(model, devices=["cpu"] * options.stages, chunks=options.chunks)
        return (
            f"{options.stages} stages in one process",
            pipe,
            lambda batch: pipe.step(**batch, schedule=options.schedule),
        )
    dist.init_process_group("gloo")
    ranks = [stage % dist.get_world_size() for stage in range(options.stages)]
    rank = Rank(model, ranks=ranks, chunks=options.chunks)
    name = f"{options.stages} stages in {dist.get_world_size()} processes"
    return name, rank, lambda batch: rank_step(rank, batch, options.schedule)


def rank_step(rank: Rank, batch: dict[str, Tensor], schedule: str) -> Tensor:
    """A step under 1F1B: the model divides the sum over words by this number, so the losses of micro-batches add up."""
    words = (batch["labels"][:, 1:] != -100).sum()
    loss: Tensor = rank.step(**batch, num_items_in_batch=words, reduction="sum", schedule=schedule)
    return loss


def draw(step: Step, batch: dict[str, Tensor], path: Path) -> None:
    """Save a drawing of the fastest of some steps; every process records all stages, and the first one saves."""
    timelines = []
    for _ in range(8):
        with record() as timeline:
            step(batch)
        timelines.append(timeline)
    if int(os.environ.get("RANK", 0)) == 0:
        min(timelines, key=lambda timeline: timeline.makespan).save(path)


def plain_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


def show(name: str, losses: Sequence[float], seconds: float, parameters: int) -> None:
    table = Table()
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    for k in sorted({*range(0, len(losses), 10), len(losses) - 1}):
        table.add_row(str(k + 1), f"{losses[k]:.4f}")
    console.print(f"Trained by {name}:", table)
    console.print(f"{seconds:.1f} s; this process holds {parameters / 1e3:.0f} thousand parameters")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

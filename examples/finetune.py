"""Train a Hugging Face language model in a pipeline, save it, and resume with a different number of stages.

python examples/finetune.py
python examples/finetune.py --devices cuda:0 cuda:1 --then cuda:0 cuda:1 cuda:2 cuda:3
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from _compare import compare_memory, compare_results, console, draw, parser
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.utils import logging

from gpipe import GPipe


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    text = " ".join(" ".join(topics.values()).split())  # what help("for") and the like print: 420 kB of English
    tokenizer = tokenizer_for(text, options.vocabulary)
    train, test = blocks(tokenizer, text, options.length)
    model = language_model(options)

    run = Run.of(model, options.devices, options)
    before = run.loss(test)
    run.fit(train, options.steps // 2)
    saved = run.loss(test)
    with tempfile.TemporaryDirectory() as folder:
        run.save(Path(folder))
        run.pipe.close()
        run = Run.load(Path(folder), options.then or [*options.devices, options.devices[-1]], options)
    loaded = run.loss(test)
    run.fit(train, options.steps)

    now = run.loss(test)
    console.print(f"Loss on text that is not trained on:\n  at first: {before:.3f}\n  when saved: {saved:.3f}")
    console.print(f"  when loaded, in another number of stages: {loaded:.3f}\n  now: [bold]{now:.3f}[/]\n")
    written = continued(run.model, tokenizer, options.prompt)
    console.print(f"{options.prompt!r} goes on with {written!r}\n", highlight=False, soft_wrap=True)
    compare(run, train[: options.batch], test, options)
    run.pipe.close()


def compare(run: Run, rows: Tensor, test: Tensor, options: argparse.Namespace) -> None:
    """Compare the results and memory of the pipeline with the plain model."""
    task = Rows(rows)
    plain = copy.deepcopy(run.model).cpu().eval()
    run.pipe.eval()  # without dropout, whose masks a pipeline draws on its own
    unseen = Rows(test)
    compare_results(plain, run.pipe, task, {"loss on unseen text": lambda model: f"{unseen.loss(model).item():.4f}"})
    run.pipe.train()
    alone = GPipe(copy.deepcopy(plain).train(), devices=options.devices[:1], checkpoint="never")
    compare_memory(alone, run.pipe, run.optimizer, task)
    draw(run.pipe, task, options.timeline)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, "gpipe-finetune.svg", chunks=4)
    options.add_argument("--then", nargs="+", help="devices of the second half (default: one stage more)")
    options.add_argument("--steps", type=int, default=100, help="of the optimizer; half of them before it is saved")
    options.add_argument("--batch", type=int, default=16, help="blocks of text in a mini-batch")
    options.add_argument("--length", type=int, default=64, help="tokens in a block")
    options.add_argument("--vocabulary", type=int, default=1024, help="tokens there are")
    options.add_argument("--width", type=int, default=128, help="of the hidden state")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--prompt", default="The statement")
    return options.parse_args(argv)


def tokenizer_for(text: str, size: int) -> Tokenizer:
    """Byte-pair encoding, learned from the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text.splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def blocks(tokenizer: Tokenizer, text: str, length: int) -> tuple[Tensor, Tensor]:
    """The text as token numbers of shape (blocks, length): to train with, and at most 64 blocks to test with."""
    tokens = torch.tensor(tokenizer.encode(text).ids)
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    test = min(64, max(1, len(rows) // 10))
    return rows[:-test], rows[-test:]


def language_model(options: argparse.Namespace, **changes: Any) -> GPT2LMHeadModel:
    """Return a small untrained GPT-2; ``AutoModelForCausalLM.from_pretrained(...)`` works as well."""
    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_positions=max(options.length, 64),
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.width // 32,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **changes,
    )
    return GPT2LMHeadModel(config)  # its head is tied to its embedding, on whatever stages both are


@dataclass
class Run:
    """The state of a training run, which can be saved and loaded."""

    model: PreTrainedModel
    pipe: GPipe
    optimizer: torch.optim.Optimizer
    schedule: OneCycleLR
    options: argparse.Namespace
    step: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, devices: Sequence[str], options: argparse.Namespace) -> Run:
        """A pipeline of the model, balanced by a measurement of its layers."""
        rows = max(1, options.batch // options.chunks)
        sample = batch_of(torch.zeros(rows, options.length, dtype=torch.int64))
        pipe = GPipe(model.train(), devices=devices, chunks=options.chunks, sample=sample)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3, weight_decay=0.1)
        schedule = OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps)
        console.print(f"{len(pipe)} layers on {', '.join(devices)}: {' + '.join(map(str, pipe.balance))}")
        return cls(model, pipe, optimizer, schedule, options)

    def fit(self, rows: Tensor, until: int) -> None:
        """Train up to the step ``until``."""
        with progress() as bar:
            task = bar.add_task("training", total=self.options.steps, completed=self.step, loss=float("nan"))
            while self.step < until:
                loss = self.train_on(mini_batch(rows, self.options.batch, self.step))
                self.step += 1
                bar.update(task, advance=1, loss=loss)

    def train_on(self, rows: Tensor) -> float:
        self.optimizer.zero_grad()
        with self.mixed_precision():
            loss = self.pipe.step(**batch_of(rows), schedule="1f1b")
        nn.utils.clip_grad_norm_(self.pipe.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return float(loss)

    @torch.no_grad()
    def loss(self, rows: Tensor) -> float:
        """The mean loss of a token."""
        self.pipe.eval()
        with self.mixed_precision():
            output = self.pipe(**batch_of(rows))
        self.pipe.train()
        return float(output.loss)

    def mixed_precision(self) -> torch.autocast:
        return torch.autocast(self.pipe.devices[0].type, dtype=torch.bfloat16)

    def save(self, folder: Path) -> None:
        """The model as its own library does it, since the pipeline trains that very object; and the rest."""
        self.model.save_pretrained(folder)
        rest = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict(), "step": self.step}
        torch.save({**rest, "generator": torch.get_rng_state()}, folder / "training.pt")

    @classmethod
    def load(cls, folder: Path, devices: Sequence[str], options: argparse.Namespace) -> Run:
        """Load a run. Parameter names and order do not depend on the stages; on CPUs, dropout does not either."""
        run = cls.of(AutoModelForCausalLM.from_pretrained(folder), devices, options)
        rest = torch.load(folder / "training.pt", map_location="cpu")
        run.optimizer.load_state_dict(rest["optimizer"])
        run.schedule.load_state_dict(rest["schedule"])
        run.step = rest["step"]
        torch.set_rng_state(rest["generator"])
        return run


@dataclass(frozen=True)
class Rows:
    """A mini-batch of text."""

    rows: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(**batch_of(self.rows)).loss
        return loss

    def step(self, pipe: GPipe, schedule: str) -> Tensor:
        loss: Tensor = pipe.step(**batch_of(self.rows), schedule=schedule)
        return loss


def batch_of(rows: Tensor) -> dict[str, Any]:
    """Return the model's arguments. It computes its loss from the labels, shifted by one token."""
    return {"input_ids": rows, "labels": rows}


def mini_batch(rows: Tensor, size: int, step: int) -> Tensor:
    """The same for a step, whether or not the run was loaded in between."""
    chosen = torch.randint(len(rows), (size,), generator=torch.Generator().manual_seed(step))
    return rows[chosen]


def progress() -> Progress:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


@torch.no_grad()
def continued(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, tokens: int = 40) -> str:
    """Let the model itself, without a pipeline, continue the prompt."""
    model = copy.deepcopy(model).eval().cpu()  # the pipeline keeps using its parameters where they are
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, top_k=20)
    written: str = tokenizer.decode(found[0, ids.shape[1] :].tolist())
    return written


if __name__ == "__main__":
    main()

"""Train adapters of a language model in 4 bits: in a pipeline, and in the order of ``device_map``, one stage at a time.

python examples/qlora.py
python examples/qlora.py --devices cuda:0 cuda:1 --chunks 8 --width 2048 --length 512
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from _compare import console, draw, mebibytes, parser
from rich.table import Table
from torch import Tensor, nn

from gpipe import GPipe, Timeline, record

NEEDED = ("transformers", "peft")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"this example needs {' and '.join(missing)}: python -m pip install transformers peft bitsandbytes")

from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils import is_bitsandbytes_available, logging  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.devices[0].startswith("cpu"):
        torch.set_num_threads(1)  # a core for each stage, as each GPU has its own
    with tempfile.TemporaryDirectory() as folder:
        save_a_model(Path(folder), options)
        pipeline = Contender.of(Path(folder), options.chunks, options)
        in_turns = Contender.of(Path(folder), 1, options)
    # Alternately, so that whatever else the machine does slows down both.
    for step in range(options.steps + 1):
        for contender in (in_turns, pipeline):
            contender.train_on(mini_batch(step, options))
    show_weights(pipeline.pipe)
    show_steps(in_turns, pipeline)
    draw(pipeline.pipe, Rows(mini_batch(0, options)), options.timeline)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, "gpipe-qlora.svg", chunks=4)
    options.add_argument("--steps", type=int, default=3, help="that are measured, after one that is not")
    options.add_argument("--checkpoint", choices=["always", "except_last", "never"], default="never")
    options.add_argument("--batch", type=int, default=32, help="rows of a mini-batch")
    options.add_argument("--length", type=int, default=128, help="tokens of a row")
    options.add_argument("--vocabulary", type=int, default=512, help="tokens there are")
    options.add_argument("--width", type=int, default=256, help="of the hidden state")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--rank", type=int, default=8, help="of the adapters")
    return options.parse_args(argv)


def save_a_model(folder: Path, options: argparse.Namespace) -> None:
    """Write a small Llama with random weights, as a stand-in for a model from the Hub."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def load(folder: Path, rank: int) -> nn.Module:
    """The saved model, in 4 bits if bitsandbytes is installed, with new adapters."""
    torch.manual_seed(1)
    if is_bitsandbytes_available():
        bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,  # so that losses can be compared to the last digits
        )
        base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits)
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)  # the pipe recomputes blocks
    else:
        base = AutoModelForCausalLM.from_pretrained(folder)
    adapters = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    tuned: nn.Module = get_peft_model(base, adapters)
    return tuned


class Contender(NamedTuple):
    """A pipe to train, and the results of its steps."""

    pipe: GPipe
    optimizer: torch.optim.Optimizer
    losses: list[float]
    seconds: list[float]
    timelines: list[Timeline]

    @classmethod
    def of(cls, folder: Path, chunks: int, options: argparse.Namespace) -> Contender:
        """Create a pipe of a fresh copy of the model. With one micro-batch its stages run sequentially."""
        model = load(folder, options.rank)
        pipe = GPipe(model, devices=options.devices, chunks=chunks, checkpoint=options.checkpoint)
        trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
        return cls(pipe, torch.optim.AdamW(trained, lr=1e-3), [], [], [])

    def train_on(self, rows: Tensor) -> None:
        synchronize()
        start = time.perf_counter()
        with record() as timeline:
            loss = Rows(rows).step(self.pipe, "1f1b")
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.timelines.append(timeline)


class Rows(NamedTuple):
    """A mini-batch of tokens, each predicted from the previous ones."""

    rows: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(input_ids=self.rows, labels=self.rows).loss
        return loss

    def step(self, pipe: GPipe, schedule: str) -> Tensor:
        loss: Tensor = pipe.step(input_ids=self.rows, labels=self.rows, schedule=schedule)
        return loss


def mini_batch(step: int, options: argparse.Namespace) -> Tensor:
    """Rows that count upwards from random tokens: the model can learn them."""
    first = torch.randint(options.vocabulary, (options.batch, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(options.length)) % options.vocabulary


def synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def show_weights(pipe: GPipe) -> None:
    """Print the bytes of each stage's weights, packed as they are, and of its adapters."""
    kind = "in 4 bits" if is_bitsandbytes_available() else "in 32 bits, because bitsandbytes is not installed"
    table = Table(title=f"Weights {kind}")
    for heading in ("stage", "device", "layers", "all weights", "of which adapters"):
        table.add_column(heading, justify="right")
    for stage, (part, device) in enumerate(zip(pipe.partitions, pipe.devices, strict=True)):
        whole = sum(value.nbytes for value in part.state_dict().values() if isinstance(value, Tensor))
        adapters = sum(parameter.nbytes for parameter in part.parameters() if parameter.requires_grad)
        table.add_row(str(stage), str(device), str(pipe.balance[stage]), mebibytes(whole), mebibytes(adapters))
    console.print(table)


def show_steps(in_turns: Contender, pipeline: Contender) -> None:
    """Print the seconds of a step, how long each stage computed, and whether the losses are equal."""
    stages, chunks = len(pipeline.pipe.partitions), pipeline.pipe.chunks
    table = Table(title=f"A step on {stages} stages")
    for heading in ("", "in turns", "pipeline"):
        table.add_column(heading, justify="right", no_wrap=True)
    both = (in_turns, pipeline)
    seconds = [contender.seconds[1:] for contender in both]  # the first step is slower: memory, threads
    table.add_row("micro-batches", *(str(contender.pipe.chunks) for contender in both))
    table.add_row("median", *(f"{statistics.median(each):.3f} s" for each in seconds))
    table.add_row("fastest – slowest", *(f"{min(each):.3f} – {max(each):.3f} s" for each in seconds))
    for stage in range(stages):
        table.add_row(f"stage {stage} is busy", *(f"{busy_share(contender, stage):.0%}" for contender in both))
    table.add_row("all stages together are busy for", *(f"{busy_seconds(contender):.3f} s" for contender in both))
    console.print(table)
    ratio = statistics.median(seconds[0]) / statistics.median(seconds[1])
    # Each stage has m micro-batches to compute, and n - 1 turns of others to wait for.
    bound = stages * chunks / (stages + chunks - 1)
    console.print(f"The pipeline is {ratio:.2f} times as fast; the bound with {stages} devices is {bound:.2f}.")
    apart = max(abs(a - b) / a for a, b in zip(in_turns.losses, pipeline.losses, strict=True))
    console.print(
        f"Losses of {len(pipeline.losses)} steps: {pipeline.losses[0]:.4f} to {pipeline.losses[-1]:.4f};", end=" "
    )
    console.print(f"the two orders differ by at most {apart:.0e} of them.\n")


def busy_share(contender: Contender, stage: int) -> float:
    """The median share of a step in which a stage computes."""
    return statistics.median(timeline.utilization[stage] for timeline in contender.timelines[1:])


def busy_seconds(contender: Contender) -> float:
    """The median of the seconds that all stages compute in a step, together."""
    return statistics.median(
        timeline.makespan * sum(timeline.utilization.values()) for timeline in contender.timelines[1:]
    )


if __name__ == "__main__":
    main()

"""Colour Python source with a stack of LSTMs that reads it letter by letter.

python examples/tagger.py
python examples/tagger.py --devices cuda:0 cuda:1 cuda:2 cuda:3 --layers 8 --width 512 --steps 2000
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import io
import keyword
import tokenize
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from _compare import MiniBatch, compare_memory, compare_results, console, draw, parser
from rich.progress import track
from rich.text import Text
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.balance import uniform

STYLES = {
    "space": "",
    "name": "",
    "keyword": "bold magenta",
    "number": "cyan",
    "string": "green",
    "comment": "blue",
    "operator": "yellow",
}
"""The tags of a letter, and how they are displayed."""

TAGS = {name: number for number, name in enumerate(STYLES)}
TRAINING = ("argparse", "ast", "calendar", "csv", "dataclasses", "difflib", "inspect", "logging", "pathlib", "typing")
UNSEEN = "textwrap"  # Python's own modules, too


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.manual_seed(0)
    data = [windows(name, options.length) for name in TRAINING]
    letters, tags = torch.cat([rows for rows, _ in data]), torch.cat([rows for _, rows in data])
    model = tagger(options.width, options.layers)
    plain = copy.deepcopy(model)

    task = MiniBatch(letters[: options.batch], tags[: options.batch], cross_entropy, reduction="mean")
    pipe = GPipe(
        model, uniform(len(options.devices), model), devices=options.devices, chunks=options.chunks, checkpoint="never"
    )
    optimizer = fit(pipe, letters, tags, options)

    unseen, truth = windows(UNSEEN, options.length)
    console.print("Letters of a module never seen in training, coloured by the model:")
    console.print(coloured(unseen[-8:], tags_of(pipe, unseen[-8:])), "")
    right = {
        f"letters tagged right, {UNSEEN}.py": lambda model: f"{(tags_of(model, unseen) == truth).float().mean():.2%}"
    }
    compare_results(plain, pipe, task, right)
    alone = GPipe(copy.deepcopy(plain), [len(plain)], devices=options.devices[:1], checkpoint="never")
    compare_memory(alone, pipe, optimizer, task)
    draw(pipe, task, options.timeline)
    pipe.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, "gpipe-tagger.svg", chunks=4)
    options.add_argument("--steps", type=int, default=100, help="of the optimizer")
    options.add_argument("--batch", type=int, default=32, help="rows of letters in a mini-batch")
    options.add_argument("--length", type=int, default=64, help="letters in a row")
    options.add_argument("--width", type=int, default=64, help="features of a letter")
    options.add_argument("--layers", type=int, default=4, help="number of bidirectional LSTMs")
    return options.parse_args(argv)


class Reader(nn.Module):
    """A bidirectional LSTM with a shortcut. Its final states are dropped, since a row is read completely."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return x + output


def tagger(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(128, width), *(Reader(width) for _ in range(layers)), nn.Linear(width, len(TAGS)))


def cross_entropy(output: Tensor, tags: Tensor) -> Tensor:
    """Return the mean over all letters, which is a mean over rows, since rows have equal lengths."""
    return F.cross_entropy(output.flatten(0, 1), tags.flatten())


def windows(module: str, length: int) -> tuple[Tensor, Tensor]:
    """The letters of a module of Python's, and their tags, both of shape (rows, length)."""
    source = inspect.getsource(importlib.import_module(module))
    rows = len(source) // length
    letters = torch.tensor([min(ord(letter), 127) for letter in source[: rows * length]])
    return letters.view(rows, length), torch.tensor(tagged(source)[: rows * length]).view(rows, length)


def tagged(source: str) -> list[int]:
    """For each letter the tag of its token, as Python's own tokenizer finds it."""
    starts = [0, *accumulate(len(line) for line in io.StringIO(source))]
    tags = [TAGS["space"]] * len(source)
    for kind, text, (row, column), _, _ in tokenize.generate_tokens(io.StringIO(source).readline):
        start = starts[row - 1] + column
        tags[start : start + len(text)] = [tag(kind, text)] * len(text)
    return tags


def tag(kind: int, text: str) -> int:
    name = tokenize.tok_name[kind]
    if name == "NAME":
        return TAGS["keyword" if keyword.iskeyword(text) else "name"]
    known = {"NUMBER": "number", "COMMENT": "comment", "OP": "operator"}
    return TAGS["string" if "STRING" in name else known.get(name, "space")]  # Python 3.12 has FSTRING_START too


def fit(pipe: GPipe, letters: Tensor, tags: Tensor, options: argparse.Namespace) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=options.steps)
    for _ in track(range(options.steps), "training", console=console):
        chosen = torch.randint(len(letters), (options.batch,))
        optimizer.zero_grad()
        pipe.step(letters[chosen], tags[chosen], loss_fn=cross_entropy, reduction="mean")
        optimizer.step()
        schedule.step()
    return optimizer


@torch.no_grad()
def tags_of(model: nn.Module, letters: Tensor) -> Tensor:
    model.eval()
    found: Tensor = model(letters).argmax(dim=-1)
    model.train()
    return found.cpu()


def coloured(letters: Tensor, tags: Tensor) -> Text:
    styles = list(STYLES.values())
    pairs = zip(letters.flatten().tolist(), tags.flatten().tolist(), strict=True)
    return Text.assemble(*((chr(letter), styles[tag]) for letter, tag in pairs))


if __name__ == "__main__":
    main()

"""Measures the table of families in docs/models.md.

python -m tests.frameworks.table               # rewrites it
python -m tests.frameworks.table GPT-2 Llama   # these lines only
"""

import copy
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe import Arguments, GPipe

from .families import EVERY, ROWS, Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CHUNKS = 3
SCHEDULES = ("1f1b", "fill_drain", "zero_bubble")
HEAD = """\
| family | 1F1B | fill-drain | zero bubble | checkpointing | dropout | tied | frozen base | names |
|---|---|---|---|---|---|---|---|---|"""

Gradients = dict[str, Tensor | None]


def row(name: str) -> str:
    """The line of a family."""
    try:
        cells = Measured(EVERY[name]).cells()
    except ValueError as refusal:
        cells = [f"refused: {reason(refusal)}", *[""] * 7]
    return f"| {name} | {' | '.join(cells)} |".replace("  ", " ")


def reason(refusal: ValueError) -> str:
    """Return the beginning of the error message, which names the cause."""
    return str(refusal).partition(";")[0]


class Measured:
    """Results of a family in a pipeline of three stages, compared with the plain model."""

    def __init__(self, family: Family) -> None:
        self.family = family
        model = made(family, tie_word_embeddings=False)
        self.plain = copy.deepcopy(model)
        self.model = model

    def cells(self) -> list[str]:
        expected = alone(self.plain, self.family)
        return [
            *(self.likeness(self.trained(schedule), expected) for schedule in SCHEDULES),
            self.likeness(self.trained(checkpoint="always"), expected),
            self.dropout(expected),
            self.tied(),
            self.frozen(),
            self.names(),
        ]

    def trained(self, schedule: str = "1f1b", checkpoint: str = "never") -> Gradients:
        return trained(self.model, self.family, schedule, checkpoint)

    def likeness(self, found: Gradients, expected: Gradients) -> str:
        """Describe the difference between gradients and expected gradients."""
        tolerance, off = self.family.tolerance, distance(found, expected)
        if off > tolerance:
            return f"off by {off:.0e}"
        return "equal" if tolerance == 1e-9 else f"within {tolerance:.0e}".replace("e-0", "e-")

    def dropout(self, without: Gradients) -> str:
        """Return whether recomputation repeats dropout masks; a dash if the model has no dropout."""
        set_dropout(self.model, 0.3)
        found = []
        for checkpoint in ("never", "always"):
            torch.manual_seed(5)
            found.append(self.trained(checkpoint=checkpoint))
        set_dropout(self.model, 0.0)
        if distance(found[0], without) <= self.family.tolerance:
            return "–"
        return "repeats" if distance(found[1], found[0]) <= self.family.tolerance else "other masks"

    def tied(self) -> str:
        """A head that is the embedding; a dash if the model has none."""
        model = made(self.family, tie_word_embeddings=True)
        if not shares(model):
            return "–"
        plain = copy.deepcopy(model)
        return self.likeness(trained(model, self.family), alone(plain, self.family))

    def frozen(self) -> str:
        """Train with the first half of the parameters frozen."""
        for model in (self.model, self.plain):
            parameters = list(model.parameters())
            for parameter in parameters[: len(parameters) // 2]:
                parameter.requires_grad_(False)
        return self.likeness(self.trained(), alone(self.plain, self.family))

    def names(self) -> str:
        """Return whether parameter names and their order match the model's, and state dicts load."""
        pipe = piped(self.model)
        if names(pipe) != names(self.plain):
            return "others"
        fresh = {key: value * 2 + 1 for key, value in self.plain.state_dict().items()}
        pipe.load_state_dict(fresh)
        loaded = all(torch.equal(value, fresh[key]) for key, value in self.model.state_dict().items())
        return "kept" if loaded else "not loaded"


def names(model: nn.Module) -> list[list[str]]:
    """The names of parameters, buffers, modules, and of a state dict, in order."""
    listings = (model.named_parameters(), model.named_buffers(), model.named_modules())
    return [*([name for name, _ in listing] for listing in listings), list(model.state_dict())]


def made(family: Family, **settings: bool) -> nn.Module:
    model = family.make(**settings)
    set_dropout(model, 0.0)
    return model


def set_dropout(model: nn.Module, probability: float) -> None:
    """Layers of dropout, and numbers that modules hand to functions; blocks are not left out."""
    for module in model.modules():
        names = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        for name in {*names, *(["p"] if isinstance(module, nn.Dropout) else [])} - {"layerdrop"}:
            setattr(module, name, probability)


def shares(model: nn.Module) -> bool:
    return len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))


def piped(model: nn.Module, checkpoint: str = "never", chunks: int = CHUNKS) -> GPipe:
    return GPipe(model, devices=["cpu"] * 3, chunks=chunks, checkpoint=checkpoint)


def trained(model: nn.Module, family: Family, schedule: str = "1f1b", checkpoint: str = "never") -> Gradients:
    """The gradients that a step of a pipe of ``model`` gives it."""
    model.zero_grad()
    pipe = piped(model, checkpoint)
    inputs = Arguments((), family.inputs(ROWS))
    pipe.step(inputs, loss_fn=lambda output: result(output).square().mean(), reduction="mean", schedule=schedule)
    pipe.close()
    return gradients(model)


def alone(model: nn.Module, family: Family) -> Gradients:
    """Return the plain model's gradients; on micro-batches if the model depends on the full batch."""
    model.zero_grad()
    inputs = family.inputs(ROWS)
    count = CHUNKS if family.by_micro_batch else 1
    for k in range(count):
        part = {name: value.chunk(count)[k] for name, value in inputs.items()}
        (result(model(**part)).square().mean() / count).backward()
    return gradients(model)


def result(output: dict[str, Tensor]) -> Tensor:
    """Return the logits, the hidden state, or the first output."""
    found = next((name for name in ("logits", "last_hidden_state") if name in output), None)
    return output[found] if found else next(iter(output.values()))


def gradients(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def distance(found: Gradients, expected: Gradients) -> float:
    """The largest difference, as a part of the largest gradient; infinite where one has none and the other has."""
    if any((found[name] is None) != (gradient is None) for name, gradient in expected.items()):
        return float("inf")
    pairs = [
        (found[name], gradient) for name, gradient in expected.items() if gradient is not None and gradient.numel()
    ]
    largest = max(float(gradient.abs().max()) for _, gradient in pairs)
    return max(float((mine - gradient).abs().max()) for mine, gradient in pairs) / largest


def rows(page: str) -> dict[str, str]:
    """The lines of the table as printed, by family."""
    table = page.partition(HEAD + "\n")[2].partition("\n\n")[0]
    return {line.split("|")[1].strip(): line for line in table.splitlines()}


def write(names: Sequence[str] = ()) -> None:
    """Measure these families, or all, and put their lines into the page."""
    lines = rows(PAGE.read_text())
    for name in names or EVERY:
        lines[name] = row(name)
        sys.stderr.write(lines[name] + "\n")
        table = "\n".join([HEAD, *(lines[each] for each in EVERY if each in lines)])
        page = re.sub(
            r"^\| family \|.*?(?=\n\n)", lambda _, table=table: table, PAGE.read_text(), count=1, flags=_BLOCK
        )
        PAGE.write_text(page)


_BLOCK = re.DOTALL | re.MULTILINE

if __name__ == "__main__":
    write(sys.argv[1:])

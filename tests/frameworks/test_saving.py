"""A pipe of a Hugging Face model is saved by the model's own means, and goes on anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, flatten

from .families import FAMILIES, transformers

dcp = pytest.importorskip("torch.distributed.checkpoint")
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def inputs(rows: int = 4) -> dict[str, Tensor]:
    found = FAMILIES["Llama"].inputs(rows)
    return {**found, "labels": found["input_ids"]}


class Run:
    """A model, in a pipe or by itself, and an optimizer of its parameters."""

    def __init__(self, balance: list[int] | None, model: nn.Module | None = None) -> None:
        self.model = FAMILIES["Llama"].make() if model is None else model.double()
        self.called: nn.Module = self.model
        if balance:
            self.called = GPipe(flatten(self.model, inputs(2)), balance, devices=["cpu"] * len(balance), chunks=2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)

    def train(self, steps: int) -> Run:
        self.model.train()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.called(**inputs())["loss"].backward()
            self.optimizer.step()
        return self


def forget(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def by_checkpoint(run: Run, again: Run, folder: Path) -> None:
    saved, found = (dict(zip("mo", get_state_dict(each.called, each.optimizer), strict=True)) for each in (run, again))
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(again.called, again.optimizer, model_state_dict=found["m"], optim_state_dict=found["o"])


def by_save_pretrained(run: Run, again: Run, folder: Path) -> None:
    run.model.save_pretrained(folder)  # type: ignore[operator]
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    again.called.load_state_dict(fresh.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def by_safetensors(run: Run, again: Run, folder: Path) -> None:
    save_file(run.called.state_dict(), folder / "pipe.safetensors")
    again.called.load_state_dict(load_file(folder / "pipe.safetensors"))
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


WAYS = [by_checkpoint, by_save_pretrained, by_safetensors]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return Run(None).train(3).model.state_dict()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("before", "after"), [([3, 3], [2, 2, 2]), ([2, 4], None), (None, [1, 5])], ids=["balance", "plain", "pipe"]
)
def test_it_goes_on_where_it_was(
    way: Callable[[Run, Run, Path], None],
    before: list[int] | None,
    after: list[int] | None,
    tmp_path: Path,
    uninterrupted: dict[str, Any],
) -> None:
    run, again = Run(before).train(2), Run(after)
    forget(again.model)
    way(run, again, tmp_path)
    again.train(1)
    torch.testing.assert_close(again.model.state_dict(), uninterrupted, rtol=1e-9, atol=1e-12)

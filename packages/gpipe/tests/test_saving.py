"""A training run that is saved and resumed equals an uninterrupted run."""

import copy
import io
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe

from .layers import Layer

dcp = pytest.importorskip("torch.distributed.checkpoint", reason="torch was built without torch.distributed")
state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
LAYERS = 5
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 3


def network() -> nn.Sequential:
    """Return a network with buffers and nested parameters; a frozen one has no optimizer state."""
    torch.manual_seed(0)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    layers = [nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), frozen, nn.BatchNorm1d(4), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def looped(s: Layer, x: torch.Tensor) -> torch.Tensor:
    """Run the layers in a custom forward."""
    for layer in s.m:
        x = layer(x)
    return x


class Run:
    """A model, its optimizer and the schedule of its learning rate."""

    def __init__(self, balance: list[int] | None, own: bool = False) -> None:
        self.model: nn.Module = Layer(looped, *network()) if own else network()
        if balance:
            blocks = [f"m.{k}" for k in range(LAYERS)] if own else None
            self.model = GPipe(self.model, balance, devices=["cpu"] * len(balance), chunks=2, blocks=blocks)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def train(self, steps: int) -> None:
        self.model.eval()  # where batch norm is the same for micro-batches; its weights are trained all the same
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(X), Y).backward()
            self.optimizer.step()
            self.schedule.step()

    @property
    def state(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def by_torch(run: Run, again: Run) -> None:
    file = io.BytesIO()
    torch.save({name: getattr(run, name).state_dict() for name in ("model", "optimizer", "schedule")}, file)
    file.seek(0)
    for name, value in torch.load(file, weights_only=True).items():
        getattr(again, name).load_state_dict(value)


def by_safetensors(run: Run, again: Run) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = safetensors.load(safetensors.save(run.model.state_dict()))
    again.model.load_state_dict(state)
    for name in ("optimizer", "schedule"):
        getattr(again, name).load_state_dict(copy.deepcopy(getattr(run, name).state_dict()))


def by_checkpoint(run: Run, again: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(_taken(run), checkpoint_id=folder)
        found = _taken(again)
        dcp.load(found, checkpoint_id=folder)
    state_dict.set_state_dict(
        again.model, again.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    again.schedule.load_state_dict(found["schedule"])


def _taken(run: Run) -> dict[str, Any]:
    model, optimizer = state_dict.get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": run.schedule.state_dict()}


balances = st.lists(st.booleans(), min_size=LAYERS - 1, max_size=LAYERS - 1).map(
    lambda cuts: [len(block) for block in "".join("x|" if cut else "x" for cut in [*cuts, False]).split("|")]
)


@cache
def uninterrupted(steps: int) -> dict[str, Any]:
    run = Run(None)
    run.train(steps)
    return run.state


@pytest.mark.parametrize("save", [by_torch, by_checkpoint, by_safetensors], ids=["torch.save", "DCP", "safetensors"])
@given(
    before=st.none() | balances,
    after=st.none() | balances,
    steps=st.integers(1, 3),  # torch's get_state_dict takes a step where there was none
    more=st.integers(1, 2),
    own=st.booleans(),
)
@settings(max_examples=10)
def test_run_resumes_with_any_balance(
    save: Callable[[Run, Run], None],
    before: list[int] | None,
    after: list[int] | None,
    steps: int,
    more: int,
    own: bool,
) -> None:
    run, again = Run(before, own), Run(after, own)
    run.train(steps)
    with torch.no_grad():
        for value in again.model.state_dict().values():
            value.zero_()  # erase the initial state
    save(run, again)
    again.train(more)
    found = {name.removeprefix("m."): value for name, value in again.state.items()}
    torch.testing.assert_close(found, uninterrupted(steps + more), rtol=1e-9, atol=1e-12)

"""A forward that modifies parameters or buffers of blocks matches a plain loop, or raises."""

import copy
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from .residuals import two_stages

CHUNKS, BLOCKS = 4, 6


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not x.is_meta:
            self.seen.append(threading.current_thread().name)
        return super().forward(x) * self.scale


def weight(block: Any) -> None:
    block.weight.mul_(1.5)


def data(block: Any) -> None:
    block.weight.data.mul_(1.5)


def view(block: Any) -> None:
    block.weight[1:].add_(0.25)


def buffer(block: Any) -> None:
    block.scale.mul_(1.5)


class Changing(nn.Module):
    """Changes block ``which`` before it calls block ``at``."""

    def __init__(self, change: Callable[[Any], None], at: int, which: int, *, once: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(BLOCKS))
        self.change, self.at, self.which, self.once, self.is_done = change, at, which, once, False

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k == self.at and not (self.once and self.is_done):
                with torch.no_grad():
                    self.change(self.layers[self.which])
                self.is_done = True
            x = x + layer(x).tanh()
        return x


@given(
    st.sampled_from([weight, data, view, buffer]),
    st.integers(0, BLOCKS - 1),
    st.integers(0, BLOCKS - 1),
    st.booleans(),
    st.sampled_from(["1f1b", "fill_drain", "evaluate"]),
    st.integers(1, 3),
)
def test_modified_block_matches_loop_or_raises(
    change: Callable[[Any], None], at: int, which: int, once: bool, how: str, stages: int
) -> None:
    model = Changing(change, at, which, once=once)
    plain, x = copy.deepcopy(model), torch.randn(8, 3)
    with closing(GPipe(model, devices=["cpu"] * stages, chunks=CHUNKS, checkpoint="never")) as pipe:
        try:
            if how == "evaluate":
                loss = pipe.evaluate(x, loss_fn=torch.sum, reduction="sum")
            else:
                loss = pipe.step(x, loss_fn=torch.sum, reduction="sum", schedule=how)
        except RuntimeError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert not (once and which >= at)
            assert any(part in said for part in ("in place during the turn", "modified by an inplace"))
            return
    with torch.set_grad_enabled(how != "evaluate"):
        losses = [plain(rows).sum() for rows in x.chunk(CHUNKS)]
    torch.testing.assert_close(loss, torch.stack(losses).sum().detach())
    for mine, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    for block in model.layers:
        assert len(block.seen) == CHUNKS
        assert all(name.startswith("gpipe forward") for name in block.seen)


@pytest.mark.parametrize("how", ["1f1b", "evaluate"])
@pytest.mark.parametrize(("at", "which"), [(0, 5), (4, 0)])
def test_change_in_each_micro_batch_raises(at: int, which: int, how: str) -> None:
    named = rf"Changing changes 'layers\.{which}\.weight' of stage . in place"
    x, options = torch.randn(8, 3), {"loss_fn": torch.sum, "reduction": "sum"}
    with closing(two_stages(Changing(weight, at, which, once=False))) as pipe:
        run: Any = pipe.evaluate if how == "evaluate" else partial(pipe.step, schedule=how)
        with pytest.raises(RuntimeError, match=named):
            run(x, **options)

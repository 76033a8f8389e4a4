"""Blocks that are called several times, in any order, with anything computed between them."""

import copy
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import Layer, gradients
from .test_listings import expect_listed

WIDTH, ROWS = 4, 6
Program = list[tuple[int, str]]
"""The indices of cells in the order of calls, and the operation after each."""


def new_cell() -> Layer:
    return Layer(lambda s, hidden: s.m[0](hidden.tanh()), nn.Linear(WIDTH, WIDTH))


class Loop(nn.Module):
    """Calls its cells, elements of a list or attributes, as the program says."""

    def __init__(self, program: Program, cells: list[nn.Module] | None = None, *, listed: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        cells = cells or [new_cell() for _ in range(3)]
        self.cells = nn.ModuleList(cells) if listed else nn.Module()
        for name, cell in enumerate([] if listed else cells):
            self.cells.add_module(str(name), cell)
        self.norm = nn.LayerNorm(WIDTH)
        self.embed = nn.Linear(2, WIDTH)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.embed(x)
        kept = [first]
        for cell, after in self.program:
            before, hidden = hidden, self.cells.get_submodule(str(cell))(hidden)
            if after == "skip":
                hidden = hidden.relu() + first
            elif after == "norm":
                hidden = self.norm(hidden)
            elif after == "residual":
                hidden = before + hidden / 2
            elif after == "in place":
                hidden += before
            elif after == "keep":
                kept.append(hidden.sin())
            elif after == "keep and write":
                kept.append(hidden)
                hidden *= 2
            elif after == "join":
                hidden = torch.cat([hidden, kept.pop()], 1)[:, 1:-3] if len(kept) > 1 else hidden.relu()
        return self.head(hidden)


def made(program: Program, cells: list[nn.Module] | None = None, **options: bool) -> Loop:
    torch.manual_seed(0)
    return Loop(program, cells, **options).double()


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def expect_trained_alike(pipe: GPipe, model: nn.Module, plain: nn.Module, schedule: str = "1f1b") -> None:
    """Outputs, names and values over three steps of AdamW."""
    expect_listed(pipe, model)
    own, other = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (pipe, plain))
    for step in range(3):
        x = batch(ROWS + step)
        loss = pipe.step(x, loss_fn=lambda output: output.square().mean(), reduction="mean", schedule=schedule)
        expected = plain(x).square().mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()))


afters = ["", "skip", "norm", "residual", "in place", "keep", "keep and write", "join"]
programs = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(afters)), min_size=1, max_size=6)
modes = st.sampled_from(["always", "except_last", "never"])
schedules = st.sampled_from(["1f1b", "fill_drain", "zero_bubble"])


@settings(max_examples=settings.default.max_examples // 2)
@given(programs, modes, schedules, st.data())
def test_calls_of_shared_blocks_are_layers(program: Program, mode: str, schedule: str, data: st.DataObject) -> None:
    plain, has_data = made(program, listed=data.draw(st.booleans())), data.draw(st.booleans())
    model, state = copy.deepcopy(plain).to(None if has_data else "meta"), None if has_data else plain.state_dict()
    names = [f"cells.{cell}" for cell in sorted({cell for cell, _ in program})]
    blocks, devices = data.draw(st.sampled_from([None, names])), ["cpu"] * data.draw(st.integers(1, 3))
    pipe = GPipe(model, devices=devices, chunks=3, checkpoint=mode, init=state, blocks=blocks)
    with closing(pipe):
        expect_trained_alike(pipe, model, plain, schedule)


@pytest.mark.parametrize(
    ("program", "is_shared"),
    [([(0, "")] * 3, False), ([(0, ""), (1, "")] * 2, False), ([(0, ""), (1, ""), (2, "")], True)],
    ids=["one cell", "two cells", "a list of one cell"],
)
def test_modules_that_are_called_several_times(program: Program, is_shared: bool) -> None:
    model = made(program, [new_cell()] * 3 if is_shared else None)
    plain = copy.deepcopy(model)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        expect_trained_alike(pipe, model, plain)
        fresh = {name: tensor + 1 for name, tensor in plain.state_dict().items()}
        pipe.load_state_dict(fresh)
        torch.testing.assert_close(dict(model.state_dict()), fresh)


orders = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(orders, orders)
def test_blocks_may_be_called_in_another_order_later(order: list[int], other: list[int]) -> None:
    model = made([(cell, "") for cell in order])
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        for program in (order, other):
            model.program = [(cell, "") for cell in program]
            torch.testing.assert_close(pipe(batch()), model(batch()))


def test_recomputation_repeats_dropout_of_each_call() -> None:
    found, made_once = [], made([(0, "")] * 3, [nn.Sequential(new_cell(), nn.Dropout(0.5))])
    for mode in ("never", "always"):
        model = copy.deepcopy(made_once)
        with closing(GPipe(model, devices=["cpu"] * 2, chunks=2, checkpoint=mode)) as pipe:
            torch.manual_seed(7)
            pipe(batch()).square().sum().backward()
        found.append(gradients(model))
    torch.testing.assert_close(found[0], found[1])


def counting(s: Layer, hidden: Tensor) -> Tensor:
    """Count calls, and let the result depend on the count."""
    s.calls += 1
    return s.m[0](hidden) * s.calls


def remembering(s: Layer, hidden: Tensor) -> Tensor:
    """It adds what it returned in the call before."""
    s.memory["before"] = s.m[0](hidden) + s.memory["before"].mean()
    return s.memory["before"]


@pytest.mark.parametrize(
    "own",
    [
        Layer(counting, new_cell(), calls=0),
        Layer(remembering, new_cell(), memory={"before": torch.zeros(())}),
        nn.Sequential(new_cell(), nn.BatchNorm1d(WIDTH)),
    ],
    ids=["counting", "remembering", "batch norm"],
)
@pytest.mark.parametrize("mode", ["always", "never"])
def test_what_one_call_leaves_for_the_next(own: nn.Module, mode: str) -> None:
    """The state matches the plain model's if there is a single micro-batch."""
    model = made([(0, "")] * 3, [copy.deepcopy(own)])
    plain = copy.deepcopy(model)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=1, checkpoint=mode)) as pipe:
        pipe.step(batch(), loss_fn=lambda output: output.square().mean(), reduction="mean")
    plain(batch()).square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))

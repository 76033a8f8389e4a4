"""A forward that takes a different path than in the first mini-batch matches the model, or raises."""

from contextlib import closing, suppress

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline

WIDTH, ROWS, BLOCKS = 4, 6, 3
STATEMENTS = ["early", "late", "output 0", "output 1", "side", "head", "buffer", "again", "mask", "number"]

# For each block, whether it is called, and operations on its result.
ways = st.lists(
    st.tuples(st.sampled_from([True, True, True, False]), st.lists(st.sampled_from(STATEMENTS), max_size=2)),
    min_size=BLOCKS,
    max_size=BLOCKS,
)


class Ways(nn.Module):
    """Takes the second path if a flag or an attribute is set, or the sum of the input is negative."""

    def __init__(self, first: list[tuple[bool, list[str]]], second: list[tuple[bool, list[str]]]) -> None:
        super().__init__()
        self.embed, self.side, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.register_buffer("numbers", torch.arange(1, WIDTH + 1))
        self.ways, self.mode = (first, second), 0

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        way = self.ways[int(flag or self.mode or bool(x.sum() < 0))]
        early = self.embed(x)
        late = early * 2
        hidden, outputs = early, [early]
        for block, (is_called, statements) in zip(self.blocks, way, strict=True):
            if is_called:
                hidden = block(hidden)
            outputs.append(hidden)
            for statement in statements:
                hidden = self.changed(statement, hidden, early, late, outputs, block)
        return self.head(hidden)

    def changed(
        self, statement: str, hidden: Tensor, early: Tensor, late: Tensor, outputs: list[Tensor], block: nn.Module
    ) -> Tensor:
        if statement.startswith("output"):
            return hidden + outputs[min(int(statement[-1]) + 1, len(outputs) - 1)]
        if statement == "number":
            return hidden * 3 if float(self.embed.bias.detach()[0]) > 0 else hidden - 1
        return {
            "early": lambda: hidden + early,
            "late": lambda: hidden * late,
            "side": lambda: hidden + self.side(early),
            "head": lambda: self.head(hidden),
            "buffer": lambda: hidden * self.numbers,
            "again": lambda: block(hidden),
            "mask": lambda: torch.where(outputs[1] > 0, hidden, -hidden),
        }[statement]()


@given(ways, ways, st.sampled_from(["flag", "attribute", "value"]), st.booleans())
def test_different_path_is_right_or_raises(
    first: list[tuple[bool, list[str]]], second: list[tuple[bool, list[str]]], how: str, steps: bool
):
    torch.manual_seed(0)
    model, x = Ways(first, second).double(), torch.rand(ROWS, WIDTH, dtype=torch.float64)
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=2, blocks="blocks")) as pipe, inline():
        with suppress(RuntimeError):  # unsupported path
            expect_same(pipe, model, steps, x=x)
        if how == "attribute":
            pipe.mode = 1
        with suppress(RuntimeError):
            expect_same(pipe, model, steps, x=-x if how == "value" else x, flag=how == "flag")


def expect_same(pipe: GPipe, model: nn.Module, steps: bool, x: Tensor, **flags: bool) -> None:
    expected = model(x, **flags)
    if steps:
        found = pipe.step(x=x, **flags, loss_fn=lambda output: output.square().mean())
        expected = expected.square().mean()
    else:
        found = pipe(x, **flags)
    torch.testing.assert_close(found, expected, check_stride=False)


class Gated(nn.Module):
    """Calls its blocks only if it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        self.is_open = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.is_open else ():
            x = x + block(x).tanh()
        return self.head(x)


def test_blocks_may_be_skipped_in_some_batches() -> None:
    model, x = Gated(), torch.randn(ROWS, WIDTH)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=3)) as pipe:
        for is_open in (False, True, False, True):
            model.is_open = is_open
            torch.testing.assert_close(pipe(x), model(x))

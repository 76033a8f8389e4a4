"""``parametrize.cached()`` in a forward: each micro-batch, and each call of a block, has its own cache."""

import subprocess
import sys
import threading
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import cached

from gpipe import GPipe

from ..layers import DOUBLE, Row, rows, running

each_mode = pytest.mark.parametrize("mode", ["never", "except_last", "always"])
each_schedule = pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
each_way = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])


class Doubled(nn.Module):
    """Twice the tanh of the original, which counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, weight: Tensor) -> Tensor:
        self.calls.append(threading.current_thread().name)
        return 2 * weight.tanh()


class Block(nn.Module):
    """Uses its parametrized weight twice, perhaps inside ``cached()``."""

    def __init__(self, caches: bool) -> None:
        super().__init__()
        self.linear, self.caches = nn.Linear(3, 3, dtype=DOUBLE), caches
        parametrize.register_parametrization(self.linear, "weight", Doubled())

    @property
    def calls(self) -> list[str]:
        return self.linear.parametrizations.weight[0].calls  # type: ignore[no-any-return, union-attr, index]

    def forward(self, x: Tensor) -> Tensor:
        with cached() if self.caches else nullcontext():
            x = self.linear(x).sin()
            self.meet()
            return self.linear(x).sin()

    def meet(self) -> None: ...


class Meets(Block):
    """Is inside ``cached()`` while another block enters, computes and leaves.

    Args:
        mine, other: set when this block, or the other one, is inside.
        call: the number of the call that waits.
    """

    def __init__(self, mine: threading.Event, other: threading.Event, call: int) -> None:
        super().__init__(caches=True)
        # A list, because a number that changes would count as state, and keep the graph.
        self.mine, self.other, self.call, self.seen = [mine], [other], call, list[None]()

    def meet(self) -> None:
        self.seen.append(None)
        if len(self.seen) == self.call:
            self.mine[0].set()
            assert self.other[0].wait(60)


class Model(nn.Module):
    """Blocks in sequence, and a parametrized layer outside them, used at both ends."""

    def __init__(self, *blocks: nn.Module, caches: bool, twice: bool = False) -> None:
        super().__init__()
        self.blocks, self.caches, self.twice = nn.ModuleList(blocks), caches, twice
        self.outer = nn.Linear(3, 3, dtype=DOUBLE)
        parametrize.register_parametrization(self.outer, "weight", Doubled())

    def forward(self, x: Tensor) -> Tensor:
        with cached() if self.caches else nullcontext():
            x = x @ self.outer.weight
            for block in self.blocks:
                x = block(x)
                if self.twice:
                    x = block(x)
            return x @ self.outer.weight.T


def made(*, block: bool = False, around: bool = False, twice: bool = False, count: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(*[Block(block) for _ in range(count)], caches=around, twice=twice)


def piped(model: Model, balance: list[int], mode: str, chunks: int = 3) -> GPipe:
    names = [f"blocks.{k}" for k in range(len(model.blocks))]
    return GPipe(model, balance, devices=["cpu"] * len(balance), blocks=names, chunks=chunks, checkpoint=mode)


def squared(out: Tensor) -> Tensor:
    return out.square().sum()


def of_model(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = squared(model(x))
    loss.backward()
    return [loss.detach(), *gradients(model)]


def of_step(pipe: GPipe, x: Tensor, model: nn.Module, schedule: str) -> list[Tensor]:
    model.zero_grad()
    loss = pipe.step(x, loss_fn=squared, reduction="sum", schedule=schedule)
    return [torch.as_tensor(loss), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["never", "always"])
@each_schedule
@pytest.mark.parametrize(("inline", "twice"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("where", [{"block": True}, {"around": True}, {"block": True, "around": True}, {}], ids=str)
def test_it_trains_as_the_plain_model(mode: str, schedule: str, inline: bool, where: Any, twice: bool):
    model, x = made(**where, twice=twice), rows(5)
    expected = of_model(model, x)
    with closing(piped(model, [1, 2], mode)) as pipe, running(inline):
        for _ in range(2):
            torch.testing.assert_close(of_step(pipe, x, model, schedule), expected)
        model.zero_grad()
        squared(pipe(x)).backward()
        torch.testing.assert_close(gradients(model), expected[1:])
        torch.testing.assert_close(of_step(pipe, x, model, schedule), expected)
    torch.testing.assert_close(of_model(model, x), expected)
    assert parametrize._cache_enabled == 0
    assert parametrize._cache == {}


@each_mode
@pytest.mark.parametrize("where", [{"block": True}, {"around": True}], ids=str)
def test_parametrization_is_computed_once_per_block_call(mode: str, where: Any):
    model, x = made(**where), rows(6)
    with closing(piped(model, [1, 2], mode)) as pipe:
        for block in model.blocks:
            block.calls.clear()
        of_step(pipe, x, model, "1f1b")
    again = {"never": 0, "except_last": 2, "always": 3}[mode]
    for block in model.blocks:
        assert len(block.calls) == 3 + again
        assert threading.main_thread().name not in block.calls


@each_mode
@pytest.mark.parametrize("own_forward", [False, True])
def test_two_stages_are_inside_at_the_same_time(mode: str, own_forward: bool):
    """The first is inside for the second micro-batch while the second enters and leaves for the first."""
    events = threading.Event(), threading.Event()
    torch.manual_seed(0)
    blocks = Meets(*events, call=2), Meets(*events[::-1], call=1)
    for block in blocks:
        block.call = 0
    plain = nn.Sequential(*blocks)
    x = rows(4)
    expected = of_model(plain, x)
    for block, call in zip(blocks, (2, 1), strict=True):
        block.call = call
        block.seen.clear()
        block.calls.clear()
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 2, "checkpoint": mode}
    model = Row(*blocks) if own_forward else plain
    names: Any = {"blocks": ["layers.0", "layers.1"]} if own_forward else {}
    with closing(GPipe(model, [1, 1], **options, **names)) as pipe:
        torch.testing.assert_close(of_step(pipe, x, plain, "fill_drain"), expected)
    again = {"never": 0, "except_last": 1, "always": 2}[mode]
    assert [len(block.calls) for block in blocks] == [2 + again, 2 + again]


@each_mode
@each_way
@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_cached_around_run_is_per_micro_batch(mode: str, inline: bool, own_forward: bool, backward_inside: bool):
    torch.manual_seed(0)
    blocks = [Block(False) for _ in range(3)]
    plain, x = nn.Sequential(*blocks), rows(5)
    expected = of_model(plain, x)
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 3, "checkpoint": mode}
    names: Any = {"blocks": [f"layers.{k}" for k in range(3)]} if own_forward else {}
    with closing(GPipe(Row(*blocks) if own_forward else plain, [1, 2], **options, **names)) as pipe, running(inline):
        with cached():
            for schedule in ("fill_drain", "1f1b"):
                torch.testing.assert_close(of_step(pipe, x, plain, schedule), expected)
        plain.zero_grad()
        for block in blocks:
            block.calls.clear()
        with cached():
            loss = squared(pipe(x))
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        torch.testing.assert_close(gradients(plain), expected[1:])
    again = {"never": 0, "except_last": 2, "always": 3}[mode]
    assert [len(block.calls) for block in blocks] == [3 + again] * 3


def test_another_thread_keeps_the_cache_of_the_process():
    """It enters before a run that uses caches, and leaves after it."""
    model, other = made(block=True), made()
    with closing(piped(model, [1, 2], "always")) as pipe, cached():
        weight = other.outer.weight
        of_step(pipe, rows(5), model, "1f1b")
        assert other.outer.weight is weight
    assert other.outer.weight is not weight


def test_random_parametrization_is_constant_within_block():
    class Dropped(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return nn.functional.dropout(weight, 0.5)

    found = []
    for mode in ("never", "always"):
        model = made(block=True)
        for block in model.blocks:
            parametrize.register_parametrization(block.linear, "weight", Dropped())
        with closing(piped(model, [1, 2], mode)) as pipe:
            torch.manual_seed(1)
            found.append(of_step(pipe, rows(5), model, "1f1b"))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_cached_entered_before_first_pipe_exits_normally():
    """The first pipe prepares the process, so the test runs in a fresh one."""
    code = (
        "import torch, gpipe\n"
        "from torch import nn\n"
        "from torch.nn.utils import parametrize\n"
        "layers = nn.Sequential(*[parametrize.register_parametrization(nn.Linear(2, 2), 'weight', nn.Tanh())"
        " for _ in range(2)])\n"
        "with parametrize.cached():\n"
        "    pipe = gpipe.GPipe(layers, [1, 1], devices=['cpu', 'cpu'], chunks=2)\n"
        "    pipe(torch.ones(2, 2)).sum().backward()\n"
        "    weight = layers[0].weight\n"
        "    with parametrize.cached():\n"
        "        pipe(torch.ones(2, 2)).sum().backward()\n"
        "        assert layers[0].weight is weight\n"
        "    assert layers[0].weight is weight\n"
        "assert layers[0].weight is not weight\n"
        "assert parametrize._cache_enabled == 0 and parametrize._cache == {}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Blocks that write into lists and dicts that they are called with: later blocks see it, on whatever stage they are."""

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import MODES, Layer, assert_same, rows
from .residuals import Residuals, plain_of
from .test_forward import done

KINDS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "user's": UserDict,
    "list": list,
    "list (deque)": deque,
    "dataclass": lambda: Store(),
    "of lists": lambda: {"seen": []},
    "in a tuple": lambda: ({}, "and a word"),
}


@dataclass
class Store:
    """Has as many values as written, like the other kinds."""

    first: Any = None
    second: Any = None

    def __setitem__(self, key: int, value: Tensor) -> None:
        setattr(self, "second" if key else "first", value)

    def values(self) -> list[Tensor]:
        return [each for each in (self.first, self.second) if each is not None]


class Writes(nn.Module):
    """Its output depends on all that earlier layers have written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin, self.number = nn.Linear(3, 3), number

    def forward(self, x: Tensor, store: Any) -> Tensor:
        x = torch.tanh(self.lin(x))
        store = store[0] if isinstance(store, tuple) else store
        store = store.get("seen", store) if isinstance(store, dict) else store
        for earlier in store if isinstance(store, list | deque) else store.values():
            x = x + earlier
        if isinstance(store, list | deque):
            store.append(x)
            while len(store) > 2:
                del store[0]
        else:
            store[self.number % 2] = x
        return x


class Model(nn.Module):
    def __init__(self, kind: str, reads: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Writes(number) for number in range(5)])
        self.kind, self.reads = kind, reads

    def forward(self, x: Tensor) -> Tensor:
        store = KINDS[self.kind]()
        for layer in self.layers:
            x = layer(x, store)
        return x + sum(store if isinstance(store, list | deque) else store.values()) if self.reads else x


def losses_and_gradients(model: Model, how: str, stages: int, checkpoint: str) -> list[Tensor]:
    x = torch.arange(12.0).reshape(4, 3) / 12
    if stages == 0:
        loss = square(model(x))
        loss.backward()
    else:
        with closing(GPipe(model, devices=["cpu"] * stages, chunks=2, checkpoint=checkpoint)) as pipe:
            for _ in range(2):  # the second forward may end after its last block
                model.zero_grad()
                if how == "call":
                    loss = square(pipe(x))
                    loss.backward()
                else:
                    loss = pipe.step(x, loss_fn=square, reduction="mean", schedule=how)
    return [torch.as_tensor(loss).detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def model_of(kind: str, reads: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(kind, reads)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("how", ["call", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_later_blocks_see_what_earlier_ones_write(kind: str, stages: int, how: str, checkpoint: str) -> None:
    if how == "call" and "list" in kind:  # the model might read the list's length
        with pytest.raises(RuntimeError, match=r"block 'layers\.0' modifies a list, dict or dataclass"):
            losses_and_gradients(model_of(kind), how, stages, checkpoint)
        return
    expected = losses_and_gradients(model_of(kind), "call", 0, "never")
    torch.testing.assert_close(losses_and_gradients(model_of(kind), how, stages, checkpoint), expected)


def test_model_reads_values_written_by_blocks() -> None:
    expected = losses_and_gradients(model_of("list", reads=True), "call", 0, "never")
    torch.testing.assert_close(losses_and_gradients(model_of("list", reads=True), "1f1b", 3, "always"), expected)


def test_model_cannot_read_written_values_in_replay() -> None:
    """An output that a block also writes is allowed."""
    with pytest.raises(RuntimeError, match=r"a tensor that block 'layers\.\d' has put into a list or dict"):
        losses_and_gradients(model_of("dict", reads=True), "call", 3, "never")


class Adding(nn.Module):
    def __init__(self, add: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(3, 3), add

    def forward(self, x: Tensor, found: Any, *, others: Any) -> Tensor:
        y = self.linear(x)
        self.add(found, y)
        others["inner"].append(x)
        return y.tanh()


class Collecting(Residuals):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        found, others = self.made(x), {"inner": [x]}
        for layer in self.layers:
            x = x + layer(x, found, others=others)
        values = found.values() if isinstance(found, dict) else found
        return self.head(x + sum(values)) + sum(others["inner"])


def replace(found: list[Tensor], y: Tensor) -> None:
    found[0] = found[0] * y.exp()


READ: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Any]]] = {
    "a list": (lambda x: [x * 2], lambda found, y: found.append(y)),
    "an empty list": (lambda x: [], lambda found, y: found.append(y)),
    "a dict": (lambda x: {}, lambda found, y: found.update({str(len(found)): y})),
    "a replaced element": (lambda x: [x * 2], replace),
    "a shorter list": (lambda x: [x * k for k in range(6)], lambda found, y: found.pop()),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["call", "whole", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", READ)
def test_read_values_match_model_or_raise(name: str, stages: int, how: str, mode: str) -> None:
    make, add = READ[name]
    model, x = Collecting(*(Adding(add) for _ in range(4))), rows(6)
    model.made = make
    with closing(GPipe(model, devices=["cpu"] * stages, chunks=3, checkpoint=mode)) as pipe:
        plain = plain_of(pipe)
        if how in ("call", "whole"):
            with pytest.raises(
                RuntimeError, match=r"block 'layers\.0' modifies a list, dict or dataclass|has put into a list or dict"
            ):
                done(pipe, x, how)
            return
        done(pipe, x, how)
    plain(x).square().sum().backward()
    assert_same(model, plain)


def exchange(found: Any, y: Tensor) -> None:
    a, b = (0, 1) if isinstance(found, list) else found
    found[a], found[b] = found[b], found[a]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("how", ["call", "whole"])
@pytest.mark.parametrize("add", [replace, exchange])
@pytest.mark.parametrize("kind", [list, dict])
def test_entries_that_a_block_replaces(kind: type, add: Any, how: str, reads: bool) -> None:
    """The blocks of HRNet replace the entries of the list that they are called with, and the model reads none later."""
    model, x = Replacing(*(Changing(add) for _ in range(4))), rows(6)
    model.kind, model.reads = kind, reads
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=3)) as pipe:
        plain = plain_of(pipe)
        if reads or add is exchange:
            with pytest.raises(
                RuntimeError, match=r"block 'layers\.0' modifies a list, dict or dataclass|has put into a list or dict"
            ):
                done(pipe, x, how)
            return
        done(pipe, x, how)
    plain(x).square().sum().backward()
    assert_same(model, plain)


class Changing(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(3, 3), change

    def forward(self, x: Tensor, found: Any) -> Tensor:
        y = self.linear(x)
        self.change(found, y)
        return y.tanh() + found[0]


class Replacing(Residuals):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        found = dict(enumerate([x * 2, x * 3])) if self.kind is dict else [x * 2, x * 3]
        for layer in self.layers:
            x = x + layer(x, found)
        return self.head(x + found[0] + found[1] if self.reads else x)


def count(found: dict[str, Any], y: Tensor) -> None:
    found["calls"] = found.get("calls", 0) + 1


@pytest.mark.parametrize("how", ["call", "1f1b"])
def test_numbers_written_by_block_raise_in_replay(how: str) -> None:
    model, x = Counting(*(Adding(count) for _ in range(4))), rows(6)
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=3)) as pipe:
        plain = plain_of(pipe)
        if how == "call":
            with pytest.raises(RuntimeError, match=r"block 'layers\.0' modifies a list, dict or dataclass"):
                done(pipe, x, how)
            return
        done(pipe, x, how)
    plain(x).square().sum().backward()
    assert_same(model, plain)


class Counting(Residuals):
    def forward(self, x: Tensor) -> Tensor:
        x, found = self.embed(x), {}
        for layer in self.layers:
            x = x + layer(x, found, others={"inner": []})
        return self.head(x) * found["calls"]


@dataclass
class Derived:
    """Has attributes besides its fields."""

    h: Tensor

    def __post_init__(self) -> None:
        self.extra = 3

    @cached_property
    def rows(self) -> int:
        return len(self.h)


@dataclass(init=False)
class AlsoDict(OrderedDict):  # type: ignore[type-arg]
    """Keeps its fields and its items equal, like a ModelOutput."""

    h: Any = None

    def __init__(self, items: Any) -> None:
        super().__init__()
        for key, value in items.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Holding(nn.Module):
    def __init__(self, made: Callable[[Tensor], Any], block: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.made = nn.Linear(3, 3), made
        function = lambda own, x, state: block(state, own.m[0](x))  # noqa: E731
        self.layers = nn.ModuleList(Layer(function, nn.Linear(3, 3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        state = self.made(x)
        for layer in self.layers:
            x = layer(x, state)
        return x


def put_item(state: AlsoDict, x: Tensor) -> Tensor:
    state["h"] = state["h"] + x
    return x * state["h"] * state.h  # type: ignore[no-any-return]


def put_field(state: Derived, x: Tensor) -> Tensor:
    state.h = state.h + x
    return x * state.h


HOLDING: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "attributes besides fields": (Derived, lambda state, x: x * state.h / state.rows * 3),
    "a field that is changed": (Derived, put_field),
    "an item that is also a field": (lambda x: AlsoDict({"h": x}), put_item),
}


@pytest.mark.parametrize("how", ["call", "whole", "1f1b"])
@pytest.mark.parametrize("kind", HOLDING)
def test_dataclasses_with_more_than_fields(kind: str, how: str) -> None:
    x = torch.arange(6.0).reshape(2, 3) / 6
    plain, model = Holding(*HOLDING[kind]), Holding(*HOLDING[kind])
    square(torch.cat([plain(row) for row in x.chunk(2)])).backward()
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=2, checkpoint="always")) as pipe:
        for _ in range(2):
            model.zero_grad()
            if how == "call":
                square(pipe(x)).backward()
            else:
                options = {"reduction": "mean", "schedule": "1f1b"} if how == "1f1b" else {}
                pipe.step(x, loss_fn=square, **options)
    assert_same(model, plain)

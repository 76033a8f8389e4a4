"""Blocks that write into lists and dicts that they are called with: later blocks see it, on whatever stage they are."""

from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

KINDS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "user's": UserDict,
    "list": list,
    "of lists": lambda: {"seen": []},
    "in a tuple": lambda: ({}, "and a word"),
}


class Writes(nn.Module):
    """Its output depends on all that earlier layers have written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin, self.number = nn.Linear(3, 3), number

    def forward(self, x: Tensor, store: Any) -> Tensor:
        x = torch.tanh(self.lin(x))
        store = store[0] if isinstance(store, tuple) else store
        store = store.get("seen", store) if isinstance(store, dict) else store
        for earlier in store if isinstance(store, list) else store.values():
            x = x + earlier
        if isinstance(store, list):
            store.append(x)
            del store[:-2]
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
        return x + sum(store) if self.reads else x


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


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("how", ["call", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_later_blocks_see_what_earlier_ones_write(kind: str, stages: int, how: str, checkpoint: str) -> None:
    expected = losses_and_gradients(model_of(kind), "call", 0, "never")
    torch.testing.assert_close(losses_and_gradients(model_of(kind), how, stages, checkpoint), expected)


def test_the_model_reads_what_blocks_write_where_its_forwards_are_whole() -> None:
    expected = losses_and_gradients(model_of("list", reads=True), "call", 0, "never")
    torch.testing.assert_close(losses_and_gradients(model_of("list", reads=True), "1f1b", 3, "always"), expected)


def test_the_model_cannot_read_it_where_blocks_are_not_called_again() -> None:
    """Nor is an output refused that a block also writes."""
    with pytest.raises(RuntimeError, match=r"a tensor that block 'layers\.\d' has put into a list or dict"):
        losses_and_gradients(model_of("list", reads=True), "call", 3, "never")

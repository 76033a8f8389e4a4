"""State that is shared by all forwards is handled like in a plain loop of micro-batches, or raises."""

import copy
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

CHUNKS, ROWS, WIDTH = 4, 8, 3
shared: list[Tensor] = []


class Waiting(nn.Linear):
    """Waits for an event when it is called for the first time."""

    event: threading.Event | None = None

    def forward(self, x: Tensor) -> Tensor:
        event, self.event = self.event, None
        assert event is None or event.wait(60)
        return super().forward(x)


class Keeping(nn.Module):
    """Calls ``before`` before its blocks, and multiplies their output by the result of ``after``."""

    def __init__(self, before: Callable[..., Any], after: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Waiting(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("buffer", torch.zeros(ROWS // CHUNKS, 1), persistent=False)
        self.kept: Any = None
        self.before, self.after = before, after
        self.starts, self.two_in_flight = 0, threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        own = self.before(self, x)
        self.starts += 1
        if self.starts == 2:
            self.two_in_flight.set()
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.after(self, x if own is None else own)


def mask(x: Tensor) -> Tensor:
    return (x.detach().sum(-1, keepdim=True) > 0).float() + 0.5


def set_attribute(model: Any, x: Tensor) -> None:
    model.kept = mask(x)


def set_in_dict(model: Any, x: Tensor) -> None:
    model.kept = {"masks": [mask(x)]}


def set_global(model: Any, x: Tensor) -> None:
    shared.append(mask(x))


def set_buffer(model: Any, x: Tensor) -> None:
    model.buffer.copy_(mask(x))


def set_item(model: Any, x: Tensor) -> None:
    model.buffer[:] = mask(x)


def add_in_place(model: Any, x: Tensor) -> None:
    model.buffer += mask(x)


def set_by_out(model: Any, x: Tensor) -> None:
    torch.mul(mask(x), 2, out=model.buffer)


def set_view(model: Any, x: Tensor) -> None:
    model.buffer[:, 0].copy_(mask(x)[:, 0])


def set_noise(model: Any, x: Tensor) -> None:
    model.kept = torch.rand(len(x), 1)


def set_from_number(model: Any, x: Tensor) -> None:
    model.kept = torch.full((1,), x.detach().sum().item())


def set_input(model: Any, x: Tensor) -> None:
    model.kept = x


def get_attribute(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.kept
    return found


SHARED: list[tuple[Callable[..., None], Callable[..., Tensor]]] = [
    (set_attribute, get_attribute),
    (set_in_dict, lambda model, x: model.kept["masks"][0]),
    (set_global, lambda model, x: shared[-1]),
    (set_buffer, lambda model, x: model.buffer),
    (set_item, lambda model, x: model.buffer),
    (add_in_place, lambda model, x: model.buffer),
    (set_by_out, lambda model, x: model.buffer),
    (set_view, lambda model, x: model.buffer),
    (set_noise, get_attribute),
    (set_from_number, get_attribute),
    (set_input, get_attribute),
]


def computed(pipe: GPipe, how: str, x: Tensor) -> None:
    if how == "call":
        pipe(x)
    elif how == "evaluate":
        pipe.evaluate(x, loss_fn=lambda y: y.square().sum(), reduction="sum")
    else:
        pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=how)


@pytest.mark.parametrize("how", ["call", "evaluate", "1f1b", "fill_drain"])
@pytest.mark.parametrize(("before", "after"), SHARED)
def test_tensor_stored_by_later_micro_batch_raises(
    before: Callable[..., None], after: Callable[..., Tensor], how: str
) -> None:
    model = Keeping(before, after)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=CHUNKS)) as pipe:
        model.layers[2].event = model.two_in_flight
        with pytest.raises(RuntimeError, match=r"for micro-batch 0 Keeping uses a tensor .* for micro-batch [1-3] has"):
            computed(pipe, how, torch.randn(ROWS, WIDTH))


def test_state_from_later_stage_raises() -> None:
    def get_and_set(model: Any, x: Tensor) -> Tensor:
        model.kept = x.detach()
        return x

    model = Keeping(lambda model, x: x if model.kept is None else x * model.kept.mean(), get_and_set)

    def twice() -> None:  # in the first run all micro-batches may find nothing
        computed(pipe, "1f1b", torch.randn(ROWS, WIDTH))
        computed(pipe, "1f1b", torch.randn(ROWS, WIDTH))

    with closing(GPipe(model, devices=["cpu"] * 2, chunks=CHUNKS)) as pipe:
        model.layers[2].event = model.two_in_flight
        with pytest.raises(RuntimeError, match="uses a tensor of shape"):
            twice()


def in_a_variable(model: Any, x: Tensor) -> Tensor:
    return mask(x)


def from_the_micro_batch_before(model: Any, x: Tensor) -> Tensor:
    before, model.kept = model.kept, mask(x)
    return model.kept if before is None else before


def in_a_table(model: Any, x: Tensor) -> Tensor:
    if model.kept is None or len(model.kept) < len(x):
        model.kept = torch.linspace(0, 1, len(x))[:, None]
    model.kept = model.kept.to(x)
    return model.kept.type_as(x)


def by_index(model: Any, x: Tensor) -> Tensor:
    return model.buffer[(x[:, 0] > 0).long()] + 1


def built_once(model: Any, x: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.rand(1)
    found: Tensor = model.kept
    return found


def counted(model: Any, x: Tensor) -> Tensor:
    model.buffer.mul_(0.5).add_(mask(x).mean())
    return mask(x)


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize(
    "before", [in_a_variable, from_the_micro_batch_before, in_a_table, by_index, built_once, counted]
)
def test_shared_state_matches_plain_loop(before: Callable[..., Tensor], schedule: str) -> None:
    model = Keeping(before, lambda model, own: own)
    plain, x = copy.deepcopy(model.layers), torch.randn(ROWS, WIDTH)
    whole = Keeping(before, model.after)
    whole.layers = plain
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole))
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=CHUNKS)) as pipe:
        for seed in range(3):
            torch.manual_seed(seed)
            loss = pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=schedule)
            optimizer.step()
            optimizer.zero_grad()
            expected = torch.zeros(())
            if before is built_once:
                whole.kept = model.kept
            for rows in x.chunk(CHUNKS):
                own = whole(rows).square().sum()
                own.backward()
                expected += own.detach()
            other.step()
            other.zero_grad()
            torch.testing.assert_close(loss, expected)

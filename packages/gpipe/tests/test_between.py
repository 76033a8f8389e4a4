"""Layers that treat the micro-batches of a run differently: nothing learned from one may be taken for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from .layers import DOUBLE, MODES, Call, running, trained

WAYS = (None, "fill_drain", "1f1b", "zero_bubble")
"""Without a schedule: forward and backward of the whole mini-batch."""


def noise(x: Tensor) -> Tensor:
    return torch.rand(x.shape, dtype=x.dtype)


# What a layer may do to a micro-batch. All are linear in each element, so that a gradient can be told from the output.
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scales": lambda x: x * 3,
    "hands on": lambda x: x,
    "draws": lambda x: x * noise(x),
    "draws twice": lambda x: x * noise(x) * noise(x),
    "draws in place": lambda x: x.mul_(noise(x)),
    "drops": lambda x: nn.functional.dropout(x, 0.5),
    "in place": lambda x: x.mul_(2),
    "in place after": lambda x: (x * 2).mul_(3),
    "detaches": lambda x: x.detach() * 5,
}

IN_PLACE = ("in place", "draws in place")


class Varied(nn.Module):
    """Does to each micro-batch what ``acts`` says for it; its number is in the first column."""

    def __init__(self, acts: tuple[str, ...]) -> None:
        super().__init__()
        self.acts = acts
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        number, value = x[:, :1], x[:, 1:]
        act = ACTS[self.acts[int(x.detach()[0, 0])]]
        if act is ACTS["hands on"]:
            return x
        if self.acts[int(x.detach()[0, 0])] in IN_PLACE:
            act(value)  # a view: the whole input counts as changed
            return x
        return torch.cat([number, act(value)], 1)


def numbered_rows(count: int, width: int = 6) -> Tensor:
    """Two rows for each micro-batch: its number, and values."""
    values = torch.rand(2 * count, width, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)) + 1
    return torch.cat([torch.arange(count, dtype=DOUBLE).repeat_interleave(2)[:, None], values], 1)


def assert_gradient_belongs(x: Tensor, output: Tensor, acts: tuple[tuple[str, ...], ...]) -> None:
    """Output and gradient of each micro-batch are those of the same linear function, unless it was detached."""
    for i, own in enumerate(zip(*acts, strict=True)):
        rows = slice(2 * i, 2 * i + 2)
        values, found, gradient = (each[rows, 1:] for each in (x.detach(), output, x.grad))
        expected = torch.zeros_like(found) if "detaches" in own else found
        torch.testing.assert_close(gradient * values, expected)
        if not any(name.startswith("d") and name != "detaches" for name in own):
            factors = {"scales": 3.0, "in place": 2.0, "in place after": 6.0, "hands on": 1.0, "detaches": 5.0}
            torch.testing.assert_close(found, values * float(torch.tensor([factors[name] for name in own]).prod()))


def in_place_from_the_first(acts: tuple[str, ...]) -> tuple[str, ...]:
    """A stage that works in place on later micro-batches alone is refused."""
    later = next((act for act in acts if act in IN_PLACE), None)
    return acts if later is None or acts[0] in IN_PLACE else (later, *acts[1:])


def plans() -> st.SearchStrategy[list[tuple[tuple[str, ...], ...]]]:
    """For each of some runs and stages, what happens to each micro-batch."""
    names = st.sampled_from(sorted(ACTS))

    def of(microbatches: int, stages: int) -> st.SearchStrategy[Any]:
        one = st.tuples(*[st.tuples(*[names] * microbatches).map(in_place_from_the_first)] * stages)
        return st.lists(one, min_size=1, max_size=3)

    return st.tuples(st.integers(1, 4), st.integers(1, 2)).flatmap(lambda size: of(*size))


@settings(max_examples=settings.default.max_examples // 2)
@given(plans(), st.sampled_from(MODES), st.sampled_from(WAYS), st.booleans())
def test_each_micro_batch_gets_the_gradient_of_what_happened_to_it(
    plan: list[tuple[tuple[str, ...], ...]], mode: str, way: str | None, inline: bool
) -> None:
    first = Call(lambda x: x * 1)  # memory of its own for the layer that works in place
    layers = [Varied(acts) for acts in plan[0]]
    model = nn.Sequential(first, *(each for layer in layers for each in (layer, Call(lambda x: x * 1))))
    pipe = GPipe(model, [1, *[2] * len(layers)], devices=["cpu"] * (1 + len(layers)), chunks=99, checkpoint=mode)
    pipe.chunks = len(plan[0][0])
    with running(inline):
        for acts in plan:
            for layer, own in zip(layers, acts, strict=True):
                layer.acts = own
            x = numbered_rows(pipe.chunks).requires_grad_()
            torch.manual_seed(3)
            assert_gradient_belongs(x, trained(pipe, x, way, lambda output, _: output.sum())[1], acts)
    pipe.close()

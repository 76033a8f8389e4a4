"""Skips travel beside the main value: each to its own stage, and its gradient back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe.transport._link import Channel
from gpipe.transport._ports import Ports
from gpipe.values._leaves import Activation
from gpipe.values._sharing import SEEN

from ..layers import within

Counts = list[int]
"""How many tensors the main value and each skip have; a single one is no tuple."""

COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def value(count: int, number: int) -> Tensor | tuple[Tensor, ...]:
    tensors = [torch.full((2,), float(10 * number + k)) for k in range(count)]
    return tensors[0] if count == 1 else tuple(tensors)


def ends(count: int) -> tuple[list[Channel], Ports, Ports]:
    """Channels, and where they begin and end."""
    channels = [Channel(f"number {k}") for k in range(count)]
    return channels, Ports(channels), Ports(channels)


@given(COUNTS, st.permutations(range(3)))
def test_values_arrive_and_gradients_come_back(counts: Counts, order: list[int]) -> None:
    _, source, target = ends(len(counts))
    sent = {i: tuple(value(count, 5 * i + k) for k, count in enumerate(counts)) for i in order}
    for i in order:
        source.put_values(i, Activation(sent[i]))
    for i in sorted(order):
        arrived = within(10, lambda i=i: target.get_values(i))
        assert list(map(id, arrived.tensors)) == list(map(id, Activation(sent[i]).tensors))
        assert len(arrived.value) == len(counts)
        target.put_gradients(i, [tensor + 1 for tensor in arrived.tensors])
    for i in order:
        gradients = within(10, lambda i=i: source.get_gradients(i))
        torch.testing.assert_close(gradients, [tensor + 1 for tensor in Activation(sent[i]).tensors])


def test_parts_that_share_memory_keep_their_ties_and_have_gradients_of_their_own() -> None:
    _, source, target = ends(2)
    x = torch.arange(4.0, requires_grad=True)
    source.put_values(0, Activation((x, x[:2]), ties=(SEEN, SEEN)))
    assert target.get_values(0).ties == [SEEN, SEEN]
    target.put_gradients(0, [torch.ones(4), torch.zeros(2)])
    assert [gradient.tolist() for gradient in source.get_gradients(0) if gradient is not None] == [[1] * 4, [0] * 2]

"""Copies between devices, and their staging memory. Ordering is tested in tests/simulated."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpipe.transport import _copy
from gpipe.transport._copy import Copy, Place, can_pin, carrier
from streams import CPUStream

CPU, META = torch.device("cpu"), torch.device("meta")


class Pinned:
    """Notes what becomes a copy in pinned memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[Tensor] = []
        monkeypatch.setattr(_copy, "can_pin", lambda kind: True)
        monkeypatch.setattr(_copy, "allocate_pinned_like", self.like)

    def like(self, tensor: Tensor) -> Tensor:
        self.copies.append(torch.zeros_like(tensor))
        return self.copies[-1]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pinned]:
    return Pinned(monkeypatch)


def to_a_device() -> Copy:
    copy = carrier(Place(CPU, CPUStream, CPUStream), Place(META, CPUStream, CPUStream))
    assert copy is not None
    return copy


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sends_from_cpu_use_private_pinned_memory(requires_grad: bool, pinned: Pinned):
    """Pinned inputs are copied as well, since their owner may change them before the device reads them."""
    source = torch.arange(6.0).view(2, 3).t().requires_grad_(requires_grad)
    payload, _ = to_a_device().send([source, None])
    assert len(pinned.copies) == 1
    assert pinned.copies[0].equal(source.detach())
    assert pinned.copies[0].stride() == source.stride()
    assert payload[1] is None
    assert payload[0].device == META
    assert payload[0].requires_grad == requires_grad
    assert payload[0].is_leaf


def test_what_cannot_be_pinned_goes_as_it_is(pinned: Pinned):
    copy = to_a_device()
    payload, _ = copy.send([torch.eye(2).to_sparse()])
    assert payload[0].is_sparse
    assert pinned.copies == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pins memory for the accelerator")
def test_without_an_accelerator_nothing_is_pinned():
    assert not can_pin("cuda")
    payload, event = to_a_device().send([torch.ones(2)])
    assert event is None
    assert to_a_device().receive((payload, event)) is payload

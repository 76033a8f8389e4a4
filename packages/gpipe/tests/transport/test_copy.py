"""Copies between devices: what waits for what, on stand-ins for streams, and by way of which memory they go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packages.streams.tests.accelerator import FakeStream, accelerator
from torch import Tensor

from gpipe.skip import inspect_skip_layout
from gpipe.transport import _copy
from gpipe.transport._copy import Copy, CopyStreams, Place, can_pin, carrier
from gpipe.transport._transport import Transport
from gpipe.values._leaves import Activation
from streams import CPUStream

CPU, META = torch.device("cpu"), torch.device("meta")


def place(index: int | None) -> tuple[torch.device, FakeStream, CopyStreams]:
    """Of a stage on a device of its own; its tensors are in the memory of the CPU all the same."""
    device = torch.device("cpu" if index is None else "xpu", index)
    return device, _copy.new_stream(device), CopyStreams.on(device)


def connected(ends: list[tuple[torch.device, FakeStream, CopyStreams]]) -> Transport:
    """The channels of stages at ``ends``."""
    return Transport(dict(enumerate(ends)), len(ends), inspect_skip_layout([]))


@pytest.fixture
def all_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copy, "_moved", lambda self, tensor: tensor.clone())


kinds = st.sampled_from(["value", "gradient"])


@pytest.mark.usefixtures("all_on_the_cpu")
@pytest.mark.parametrize("places", [(0, 1), (None, 0), (0, None)])
@given(st.lists(st.tuples(kinds, st.booleans()), max_size=8))
def test_the_reader_comes_after_the_copy_and_the_copy_after_the_source(places, sends):
    """Property: whatever was sent, and whatever both have queued meanwhile."""
    with accelerator("xpu"):
        ends = [place(index) for index in places]
        channels = connected(ends)
        between = channels.departures[0]
        for i, (kind, queued) in enumerate(sends):
            source, target = ends if kind == "value" else ends[::-1]
            out, into = (source[2][1], target[2][0]) if kind == "value" else (source[2][3], target[2][2])
            for end in ends:
                if queued and end[1] is not CPUStream:
                    end[1].work()
            link = between.values if kind == "value" else between.gradients
            link.put(i, Activation(torch.ones(1)) if kind == "value" else [torch.ones(1), None])
            copies = [stream for stream in (out, into) if stream is not CPUStream]
            assert all(stream.comes_after(source[1]) for stream in copies if stream is out)
            for stream in copies:
                stream.work()
            event = link._queue.get()
            link._queue.put(event)
            link.get(i)
            if target[1] is not CPUStream:
                last = copies[-1]
                assert target[1].seen[last] >= last.queued - 1
            else:
                assert event[1][1].synchronised


@pytest.mark.usefixtures("all_on_the_cpu")
def test_what_comes_does_not_wait_for_what_goes():
    """Under 1F1B a stage computes while the next value arrives: its stream must not wait for the output's."""
    with accelerator("xpu"):
        ends = [place(0), place(1), place(2)]
        first, second = (connected(ends).arrivals[j] for j in (1, 2))
        middle, (values_in, values_out, gradients_in, gradients_out) = ends[1][1], ends[1][2]
        assert len({values_in, values_out, gradients_in, gradients_out, middle}) == 5
        middle.work()
        second.values.put(0, Activation(torch.ones(1)))
        values_out.work()
        first.gradients.put(0, [torch.ones(1)])
        first.values.put(1, Activation(torch.ones(1)))
        second.gradients.put(0, [torch.ones(1)])
        assert not values_in.comes_after(values_out)
        assert not values_in.comes_after(middle)
        assert not gradients_in.comes_after(middle)
        assert not gradients_out.comes_after(values_out)


class Pinned:
    """Notes what becomes a copy in pinned memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[Tensor] = []
        monkeypatch.setattr(_copy, "can_pin", lambda kind: True)
        monkeypatch.setattr(_copy, "_pinned_like", self.like)

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
def test_what_leaves_the_cpu_goes_by_pinned_memory_of_its_own(requires_grad: bool, pinned: Pinned):
    """Also what is pinned already: its owner may change it before the device has read it."""
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

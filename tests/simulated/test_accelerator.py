"""The simulator itself, apart from faults planted in the library: its reports, and races it must not miss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streams import CPUStream, record_event, use_stream, wait_event, wait_stream

from .accelerator import device, found, library, new_stream


def texts() -> list[str]:
    return sorted({race.text for race in found()})


def ones(k: int = 0) -> Tensor:
    return torch.ones(4, 4, device=device(k))


def test_writing_what_another_stream_reads():
    first, second = new_stream(0), new_stream(0)
    x = ones()
    for stream in (first, second):
        wait_stream(stream, torch.accelerator.current_stream(device(0)))
    with use_stream(first):
        y = x * 2
    with use_stream(second):
        x.zero_()
    assert [race.text.split(" on ")[0] for race in found()] == ["WRITE by zero_"]
    assert y.sum().item() == 32


@pytest.mark.parametrize("how", ["wait_stream", "event", "synchronise the stream", "synchronise the device"])
def test_waits_that_order(how: str):
    first, second = new_stream(0), new_stream(0)
    with use_stream(first):
        x = ones()
        event = record_event(first)
    {
        "wait_stream": lambda: wait_stream(second, first),
        "event": lambda: wait_event(second, event),
        "synchronise the stream": lambda: wait_stream(CPUStream, first),
        "synchronise the device": lambda: torch.accelerator.synchronize(device(0)),
    }[how]()
    with use_stream(second):
        (x @ x).sum().item()
    assert texts() == []


@pytest.mark.parametrize("ask", [Tensor.item, Tensor.nonzero, torch.unique, lambda x: x.equal(x), lambda x: x[x > 0]])
def test_host_waits_for_values_used_in_python(ask: Callable[[Tensor], object]):
    x = ones()[0, :1]
    library().take_counters()
    ask(x)
    assert library().take_counters()["synchronisations"] > 0

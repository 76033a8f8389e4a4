"""Links deliver every payload, and cancel waits for payloads that cannot arrive."""

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

from gpipe import GPipe
from gpipe.transport._transport import Link, stall_seconds
from gpipe.values._describe import Cancelled

from ..layers import Call, numbered, within


def test_cancelled_link_never_waits() -> None:
    link: Link[int] = Link("letters")
    link.cancel()
    with pytest.raises(Cancelled):
        link.get(0)


def test_a_reader_that_waits_already_is_let_go() -> None:
    link: Link[int] = Link("letters")
    waits = threading.Event()

    def read() -> int:
        waits.set()
        return link.get(0)

    def cancel() -> None:
        waits.wait()
        link.cancel()

    threading.Thread(target=cancel).start()
    with pytest.raises(Cancelled):
        within(10, read)


class Reports(logging.Handler):
    """Collects what is logged, and lets others wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            self.messages.append(record.getMessage())
            self._news.notify_all()

    def wait_for(self, message: str) -> bool:
        with self._news:
            return self._news.wait_for(lambda: message in self.messages, timeout=300)


@pytest.fixture
def reports() -> Any:
    handler = Reports()
    logging.getLogger("gpipe").addHandler(handler)
    yield handler
    logging.getLogger("gpipe").removeHandler(handler)


def test_a_pipe_says_which_stage_waits_for_what(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_STALL_SECONDS", "0.05")
    report = "no values between partitions 0 and 1 for micro-batch 1 in 0.05 s; still waiting"

    def slow(x: torch.Tensor) -> torch.Tensor:
        assert x[0, 0] != 1 or reports.wait_for(report)
        return x

    model = nn.Sequential(Call(slow), nn.Identity())
    pipe = GPipe(model, [1, 1], devices=["cpu", "cpu"], chunks=2)
    assert pipe(numbered(2)).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "nan", "inf"])
def test_what_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_STALL_SECONDS", text)
    with pytest.raises(ValueError, match="GPIPE_STALL_SECONDS must be a positive number of seconds") as caught:
        stall_seconds()
    assert repr(text) in str(caught.value)

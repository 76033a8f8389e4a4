"""Messages between two ends in one process: what is sent is what comes, by either way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from gpipe.distributed import _messages
from gpipe.distributed._messages import SMALL, Receiver, Sender
from gpipe.values._describe import Cancelled
from gpipe.values._leaves import Activation

CPU = torch.device("cpu")


class Line:
    """Both ends of a peer: what is sent is there at once, in order."""

    member = 0

    def __init__(self) -> None:
        self.under_way: deque[Tensor] = deque()

    def send(self, data: Tensor) -> Any:
        self.under_way.append(data.clone())

    def receive(self, data: Tensor) -> Any:
        return data

    def wait(self, work: Any, timeout: Any = None) -> None:
        if work is not None:
            came = self.under_way.popleft()
            assert work.numel() >= came.numel(), "gloo refuses what is larger than the memory for it"
            work[: came.numel()].copy_(came)


class Direct:
    """From device to device: counts what is on its way."""

    def __init__(self) -> None:
        self.under_way: deque[list[Tensor]] = deque()
        self.drained = 0

    def send(self, data: Sequence[Tensor]) -> None:
        self.under_way.append([part.clone() for part in data])

    def receive(self, sizes: Sequence[int]) -> list[Tensor]:
        parts = self.under_way.popleft()
        assert [len(part) for part in parts] == [*sizes]
        return parts

    def drain(self) -> None:
        self.drained += 1


def ends(direct: Direct | None) -> tuple[Sender, Receiver]:
    line: Any = Line()
    return Sender(line, direct), Receiver(line, CPU, direct)


WAYS = pytest.mark.parametrize("direct", [None, Direct()], ids=["host", "direct"])
VALUES = [torch.arange(3.0), torch.ones(SMALL, dtype=torch.uint8), torch.empty(0, 2), torch.ones(4, 2).t()]


@WAYS
@pytest.mark.parametrize("value", VALUES, ids=["small", "large", "empty", "transposed"])
def test_what_is_sent_comes(direct: Direct | None, value: Tensor):
    sender, receiver = ends(direct)
    for i in range(3):
        receiver.expect(1)
        sender.put(i, Activation(value, (value,), ()), flag=i == 1)
        microbatch, flag, payload = receiver.get()
        assert (microbatch, flag) == (i, i == 1)
        assert torch.equal(payload.value, value)


@WAYS
@pytest.mark.parametrize("size", [1, SMALL])
def test_what_cannot_be_read_is_taken_all_the_same(monkeypatch, direct: Direct | None, size: int):
    """Each time, and nothing of it is left for the messages after it."""
    sender, receiver = ends(direct)
    odd, plain = torch.ones(size, dtype=torch.uint8), torch.ones(2)
    with monkeypatch.context() as patch:
        patch.setattr(_messages.Form, "parse", _unreadable)
        for i in range(2):
            receiver.expect(1)
            sender.put(i, [odd])
            with pytest.raises(ValueError, match="unreadable"):
                receiver.get()
    receiver.expect(1)
    sender.put(2, [plain])
    assert torch.equal(receiver.get()[2][0], plain)
    sender.poison(b"over")
    with pytest.raises(Cancelled):
        receiver.get()
    assert receiver.poisoned == b"over"
    assert not sender.peer.under_way
    assert direct is None or not direct.under_way


def _unreadable(text: str) -> Any:
    raise ValueError("unreadable")


def test_a_head_comes_after_what_it_announces():
    """Else, where that fails, the receiver would wait for it."""
    direct = Direct()
    sender, receiver = ends(direct)
    direct.send = _refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no transfer"):
        sender.put(0, [torch.ones(2)])
    sender.poison(b"over")
    receiver.expect(1)
    with pytest.raises(Cancelled):
        receiver.get()


def _refuse(data: Sequence[Tensor]) -> None:
    raise RuntimeError("no transfer")


def test_what_there_was_no_memory_for_is_taken_first():
    direct = Direct()
    sender, receiver = ends(direct)
    sender.poison(b"over")
    receiver.drain()
    assert direct.drained == 1

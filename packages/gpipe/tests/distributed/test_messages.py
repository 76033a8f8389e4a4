"""Messages between two ends in one process, through host memory or from device to device."""

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe.distributed._forms import Form, view_as_bytes
from gpipe.distributed._messages import ROOM, SMALL, RemoteLink
from gpipe.values._describe import Cancelled
from gpipe.values._leaves import Activation


@dataclass(eq=False)
class Transfer:
    """Data that was sent, and must not change until it is received."""

    data: Tensor


Sent = dict[int, deque[Transfer]]


class Line:
    """One end of a connection. Data is read when the other end waits for it, in order; frames have a separate queue.

    Attributes:
        begun: the buffers of receives that this end has not waited for.
    """

    member = 0

    def __init__(self, out: Sent, into: Sent) -> None:
        self.out, self.into = out, into
        self.begun: list[Tensor] = []

    def send(self, data: Tensor, beside: int = 0) -> Transfer:
        found = Transfer(data)
        self.out.setdefault(beside, deque()).append(found)
        return found

    def receive(self, data: Tensor, beside: int = 0) -> tuple[Tensor, int]:
        assert all(data.data_ptr() != each.data_ptr() for each in self.begun), "the memory is in use"
        self.begun.append(data.fill_(255))
        return data, beside

    def wait(self, work: Transfer | tuple[Tensor, int], timeout: Any = None) -> None:
        if isinstance(work, Transfer):
            assert not any(work is each for sent in self.out.values() for each in sent), "it has not been received yet"
            return
        data, beside = work
        came = self.into[beside].popleft().data
        assert data.nbytes >= came.nbytes, "gloo rejects messages that are larger than the buffer"
        data[: came.nbytes] = came
        self.begun = [each for each in self.begun if each is not data]


class Direct:
    """Sends from device to device, and counts the transfers in flight."""

    def __init__(self) -> None:
        self.under_way: deque[list[Tensor]] = deque()
        self.drained = 0

    def send(self, data: Sequence[Tensor]) -> None:
        self.under_way.append([part.clone() for part in view_as_bytes(data)])

    def receive(self, form: Form) -> list[Tensor | None]:
        tensors = form.empty(torch.device("cpu"))
        for part, came in zip(view_as_bytes(tensors), self.under_way.popleft(), strict=True):
            part.copy_(came)
        return tensors

    def drain(self) -> None:
        self.drained += 1


def ends(direct: Direct | None = None) -> tuple[RemoteLink, RemoteLink]:
    """Return the two ends of a link. Only the first one may send from device to device."""
    there: Sent = {}
    back: Sent = {}
    one, other = Line(there, back), Line(back, there)
    return RemoteLink(one, out=direct), RemoteLink(other, into=direct)  # type: ignore[arg-type]


def test_small_messages_take_one_transfer_each():
    """A form is sent once, and memory does not grow with the number of forms, as for sequences of varying length."""
    sender, receiver = ends()
    line: Any = sender._peer
    kept = WeakSet[Tensor]()
    for length in [*range(4, 8), *range(SMALL, SMALL + 40)]:
        receiver.expect(3)
        for i in range(3):
            sender.put(i, [torch.ones(length)])
            sent = [each.data for beside in line.out.values() for each in beside]
            kept.update(each for each in sent if len(each) > SMALL)
            # A small message is a frame. For a large one, its tensor follows, and if the form is new, also one byte
            # for the receive that the other end has posted for the previous form.
            assert len(sent) == (1 if length < 8 else 2 if i or length == SMALL else 3)
            assert receiver.get()[2][0].sum() == length
        sender.flush()
    assert len(kept) <= 3
    sender.tell(pickle.dumps("x" * (ROOM - 100)))
    assert len(line.out[0]) == 1
    sender.tell(pickle.dumps("x" * ROOM))  # follows its frame
    assert [len(receiver.receive()) for _ in range(2)] == [ROOM - 100, ROOM]


def test_sender_keeps_only_unreceived_messages():
    """Messages in the other direction report how many were received. 1F1B keeps as many as stages have in flight."""
    first, last = ends()
    values: list[Any] = []
    gradients: list[Any] = []

    def sent(kept: list[Any]) -> Tensor:
        tensor = torch.ones(SMALL)
        kept.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    first.expect(20)
    last.expect(20)
    for i in range(20):
        first.put(i, Activation(sent(values)))
        last.get()
        if i >= 3:
            last.put(i - 3, [sent(gradients)])
            first.get()
        assert sum(not each.expired() for each in values) <= 5
        assert sum(not each.expired() for each in gradients) <= 2


def test_header_is_sent_after_its_tensors():
    """Otherwise the receiver would wait for tensors that failed to be sent. Draining includes the device transfers."""
    direct = Direct()
    sender, receiver = ends(direct)
    direct.send = _refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no transfer"):
        sender.put(0, [torch.ones(2)])
    sender.poison("over")
    receiver.expect(1)
    with pytest.raises(Cancelled):
        receiver.get()
    receiver.drain()
    assert direct.drained == 1


def _refuse(data: Sequence[Tensor]) -> None:
    raise RuntimeError("no transfer")

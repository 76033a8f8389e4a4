"""Messages between two ends in one process: what is sent is what comes, by either way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from gpipe.distributed._messages import SMALL, Receiver, Sender, Taken
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


def ends(direct: Direct | None = None) -> tuple[Sender, Receiver]:
    line: Any = Line()
    return Sender(line, direct), Receiver(line, CPU, direct)


class LateLine(Line):
    """What is sent is read no sooner than it is received, so that it must stay as it is until then."""

    def send(self, data: Tensor) -> Any:
        self.under_way.append(data)
        return data, len(self.under_way)

    def wait(self, work: Any, timeout: Any = None) -> None:
        if isinstance(work, Tensor):
            super().wait(work)
        else:
            assert not any(each is work[0] for each in self.under_way), "nobody has received it yet"


def payload_of(kind: int, i: int, size: int, requires_grad: bool) -> Any:
    """One of a few kinds of messages, with other numbers for each micro-batch."""
    x = torch.arange(2.0 * size).view(2, size) + i
    first = x.clone().requires_grad_(requires_grad)
    kinds: list[Any] = [
        first,
        (first, torch.tensor(i), torch.empty(0, 3)),
        {"x": first.detach().t(), "n": None, "m": x > 2},
        (first, x[:, ::2], float(i)),
        x.to(torch.complex64).conj(),
        x.to_sparse(),
    ]
    return Activation(kinds[kind]) if kind < len(kinds) else [None, x, x.expand(3, 2, size), None]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans()), max_size=12)
)
def test_messages_of_several_forms_come_as_they_were_sent(messages: list[Any]):
    """Whatever came before, and also if several are on their way, or what was sent has been changed since."""
    line: Any = LateLine()
    sender, receiver = Sender(line), Receiver(line, CPU)
    receiver.expect(len(messages))
    waiting: deque[tuple[int, Any]] = deque()
    came: list[Any] = []

    def get() -> None:
        i, expected = waiting.popleft()
        found, _, payload = receiver.get()
        assert found == i
        came.append((payload, expected))
        sender.arrived(receiver.taken.count)

    for i, (kind, size, requires_grad, lags, inference) in enumerate(messages):
        payload = payload_of(kind, i, size, requires_grad)
        with torch.inference_mode() if inference else nullcontext():
            sender.put(i, payload)
            waiting.append((i, payload))
            while waiting and not lags:
                get()
    while waiting:
        get()
    for payload, expected in came:  # at the end: none of them has been changed by a later one
        expect_same(payload, expected)
    assert not line.under_way


def expect_same(found: Any, expected: Any) -> None:
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    for one, other in pairs:
        assert (one is None) == (other is None)
        if other is not None:
            assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
            assert one.layout == other.layout
            assert torch.equal(one.to_dense(), other.resolve_conj().to_dense())


def _tensors(payload: Any) -> Sequence[Tensor | None]:
    return payload.tensors if isinstance(payload, Activation) else payload


def test_memory_does_not_grow_with_the_number_of_forms():
    """As of sequences of another length in each step: what was sent and has arrived is kept for the last form only."""
    line: Any = LateLine()
    sender, receiver = Sender(line), Receiver(line, CPU)
    kept = WeakSet[Tensor]()
    for length in range(1, 40):
        receiver.expect(3)
        for _ in range(3):
            sender.put(0, [torch.ones(length)])
        kept.update(line.under_way)
        for _ in range(3):
            assert receiver.get()[2][0].tolist() == [1.0] * length
        sender.flush()
    assert len(kept) <= 3


def test_a_sender_keeps_what_the_other_end_has_not_taken():
    """Each message of the other direction says how many have been taken: of 1F1B as many are kept as stages hold."""
    there, back = LateLine(), LateLine()
    taken, its = Taken(), Taken()
    out, its_out = Sender(there, taken=taken), Sender(back, taken=its)
    into, its_into = Receiver(back, CPU, answers=out, taken=taken), Receiver(there, CPU, answers=its_out, taken=its)
    values, gradients = WeakSet[Tensor](), WeakSet[Tensor]()
    for end in (into, its_into):
        end.expect(20)
    most = [0, 0]
    for i in range(20):
        out.put(i, Activation(torch.ones(SMALL)))
        values.update(there.under_way)
        its_into.get()
        if i >= 3:
            its_out.put(i - 3, [torch.ones(SMALL)])
            gradients.update(back.under_way)
            into.get()
        most = [max(most[0], len(values)), max(most[1], len(gradients))]
    assert most[0] <= 2 * 5  # a head and a tensor each
    assert most[1] <= 2 * 2


def test_without_an_answer_a_sender_waits_for_the_other_end():
    line: Any = LateLine()
    sender, receiver = Sender(line), Receiver(line, CPU)
    receiver.expect(4)
    sender.expect(2)
    for i in range(4):
        sender.put(i, [torch.ones(2)])
        if i:
            receiver.get()
    sender.put(4, [torch.ones(2)])
    with pytest.raises(AssertionError, match="nobody has received it yet"):
        sender.put(5, [torch.ones(2)])


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


@dataclass
class Unreadable:
    """Pickled as what cannot be unpickled."""

    x: Tensor

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> Any:
    raise RuntimeError("unreadable")


@WAYS
@pytest.mark.parametrize("size", [1, SMALL])
def test_what_cannot_be_read_is_taken_all_the_same(direct: Direct | None, size: int):
    """Each time, and nothing of it is left for the messages after it."""
    sender, receiver = ends(direct)
    for i in range(2):
        receiver.expect(1)
        sender.put(i, Activation(Unreadable(torch.ones(size))))
        with pytest.raises(ValueError, match="unreadable"):
            receiver.get()
    receiver.expect(1)
    sender.put(2, [torch.ones(2)])
    assert torch.equal(receiver.get()[2][0], torch.ones(2))
    sender.poison(b"over")
    with pytest.raises(Cancelled):
        receiver.get()
    assert receiver.poisoned == b"over"
    assert not sender.peer.under_way
    assert direct is None or not direct.under_way


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

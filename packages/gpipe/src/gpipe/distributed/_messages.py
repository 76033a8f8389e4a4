"""Messages from one rank to another, in one direction of a channel.

A message has a head, its form (:mod:`gpipe.distributed._forms`) if that differs from the form of the message before,
and the bytes of its tensors, unless these go from device to device (:mod:`gpipe.distributed._wires`). A small message
is one transfer, since each transfer costs a wait. The tensors of a large one are separate transfers, from their own
memory into that of the tensors that arrive::

    [microbatch, bytes of its form, flag, taken, 1 | form | tensor | tensor ...]
    [microbatch, bytes of its form, flag, taken, 0]  [form]  [tensor]  [tensor] ...

Both ends keep one form and, of the sender, the memory of small messages of that form: no more, whatever is sent.

A sender keeps the memory of a message until it knows that the message was taken: ``taken`` is the number of messages
that its own rank has taken from the other direction of the channel. Gloo does not tell without waiting. Where nothing
comes back, in a run without backwards, the sender waits instead when too many messages are under way.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..values._describe import Cancelled
from ._errors import UnreachableError
from ._forms import Form, form_of
from ._tensors import filling

SMALL: Final = 2**20
"""Bytes of the largest message that is sent in one transfer. A receiver keeps that much memory ready."""

POISON: Final = -1
"""The micro-batch number of a message that says: nothing more comes in this run."""

_LAYOUT = struct.Struct("=5q8x")
_HEAD = _LAYOUT.size
_ALIGN: Final = 16  # so that the data of any dtype are aligned, as is the end of a head
_CPU = torch.device("cpu")


class Peer:
    """A member of a group, as the other end of messages with one tag.

    Args:
        group: the process group that carries them.
        member: the number of the other end.
        tag: distinguishes these messages from others between the two.
        number: the member's number in ``group``, if it is not ``member``.
    """

    def __init__(self, group: dist.ProcessGroup, member: int, tag: int, *, number: int | None = None) -> None:
        self.member = member
        self._number = member if number is None else number
        self._group = group
        self._tag = tag

    def send(self, data: Tensor) -> Any:
        """Start to send ``data``, which must not change until :meth:`wait` has returned."""
        try:
            return self._group.send([data], self._number, self._tag)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None

    def receive(self, data: Tensor) -> Any:
        """Start to receive into ``data``, which may be larger than the message."""
        try:
            return self._group.recv([data], self._number, self._tag)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None

    def wait(self, work: Any, timeout: timedelta | None = None) -> None:
        """Wait until a transfer has ended, at most ``timeout``; the timeout of the group by default."""
        try:
            work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None


class Direct(Protocol):
    """Sends the data of messages from device to device."""

    def send(self, data: Sequence[Tensor]) -> None: ...

    def receive(self, sizes: Sequence[int]) -> list[Tensor]: ...

    def drain(self) -> None: ...


class Taken:
    """How many messages a rank has taken in this run, from one direction of a channel."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Sender:
    """The sending end.

    Args:
        peer: the receiving end.
        direct: sends the data of tensors; None if they go through host memory.
        taken: counts what this rank has taken from the other direction of the channel.
        small: bytes of the largest message that is sent in one transfer.
    """

    def __init__(
        self, peer: Peer, direct: Direct | None = None, taken: Taken | None = None, small: int = SMALL
    ) -> None:
        self.peer = peer
        self._direct = direct
        self._taken = taken or Taken()
        self._small = small
        self._form: Form | None = None
        self._reuses = False
        self._spare: list[_Frame] = []
        self._under_way: deque[list[tuple[Any, Any]]] = deque()
        self._arrived = 0
        self._most: int | None = None

    def expect(self, most: int | None) -> None:
        """Prepare for a run.

        Args:
            most: how many messages may be under way before :meth:`put` waits for the oldest; None for any number.
        """
        self._arrived, self._most = 0, most

    def put(self, microbatch: int, payload: Any, *, flag: bool = False) -> None:
        """Start to send the payload of a micro-batch."""
        form, tensors = form_of(payload)
        head = microbatch, flag
        again = form == self._form
        if again and self._reuses:
            self._send_again(head, form, tensors)
            return
        wire = Form(form.tree, tuple([each and filling(each) for each in form.tensors]))
        pairs = zip(wire.tensors, tensors, strict=True)
        data = [each.data(tensor) for each, tensor in pairs if each is not None and tensor is not None]
        if self._direct is not None:
            self._direct.send(data)  # before the head, which says that they have been sent
            data = []
        self._send(head, b"" if again else pickle.dumps(wire), data)
        if not again:
            self._form, self._spare = form, []
            self._reuses = self._direct is None and None not in form.tensors and _size(form) <= self._small

    def poison(self, why: bytes) -> None:
        """Tell the other end that nothing more comes in this run, and why."""
        self._send((POISON, False), why, ())

    def arrived(self, count: int) -> None:
        """Free the memory of the first ``count`` messages of this run, which the other end has taken."""
        while self._arrived < count:
            self._forget()

    def flush(self, timeout: timedelta | None = None) -> None:
        """Wait until everything has been received."""
        while self._under_way:
            self._forget(timeout)

    def _send_again(self, head: tuple[int, bool], form: Form, tensors: Sequence[Tensor | None]) -> None:
        """Send a small message of the form that the other end knows."""
        frame = self._spare.pop() if self._spare else _Frame(_size(form), form)
        _LAYOUT.pack_into(frame.memory, 0, head[0], 0, head[1], self._taken.count, 1)
        for place, tensor in zip(frame.tensors, tensors, strict=True):
            place.copy_(tensor.detach())  # type: ignore[union-attr]
        self._began([(self.peer.send(frame.data), frame)])

    def _send(self, head: tuple[int, bool], text: bytes, data: Sequence[Tensor]) -> None:
        parts = [part.cpu() for part in (_bytes(text), *data) if part.numel()]
        sizes = [part.numel() for part in parts]  # len() of a tensor is slower
        starts, total = places(sizes, _HEAD)
        small = total <= self._small
        memory = bytearray(total if small else _HEAD)
        _LAYOUT.pack_into(memory, 0, head[0], len(text), head[1], self._taken.count, small)
        frame = torch.frombuffer(memory, dtype=torch.uint8)
        if small:
            for start, size, part in zip(starts, sizes, parts, strict=True):
                frame[start : start + size].copy_(part)
            parts = []
        self._began([(self.peer.send(part), part) for part in (frame, *parts)])

    def _began(self, transfers: list[tuple[Any, Any]]) -> None:
        self._under_way.append(transfers)
        while self._most is not None and len(self._under_way) > self._most:
            self._forget()

    def _forget(self, timeout: timedelta | None = None) -> None:
        """Wait for the oldest message."""
        self._arrived += 1
        for work, memory in self._under_way.popleft():
            self.peer.wait(work, timeout)
            if isinstance(memory, _Frame) and memory.form is self._form:
                self._spare.append(memory)


class Receiver:
    """The receiving end.

    Args:
        peer: the sending end.
        device: the device of the tensors that are returned.
        direct: receives the data of tensors; None if they go through host memory.
        answers: the sender of the other direction of the channel; it learns what has been taken there.
        small: bytes of the largest message that is sent in one transfer.

    Attributes:
        poisoned: the reason why nothing more comes in this run; None as long as messages come.
        taken: how many messages have been taken in this run.
    """

    def __init__(
        self,
        peer: Peer,
        device: torch.device = _CPU,
        direct: Direct | None = None,
        answers: Sender | None = None,
        taken: Taken | None = None,
        small: int = SMALL,
    ) -> None:
        self.peer = peer
        self.poisoned: bytes | None = None
        self.taken = taken or Taken()
        self._device = device
        self._direct = direct
        self._answers = answers
        self._form = Form(b"", ())
        self._places: list[Tensor | None] = []
        self._expected = 0
        self._frame = _Frame(small)
        self._posted: Any = None

    def expect(self, messages: int) -> None:
        """Prepare for a run in which that many messages come. If that fails, :meth:`get` raises."""
        self._expected = messages
        self.poisoned = None
        self.taken.count = 0
        if messages:
            with suppress(UnreachableError):
                self._post()

    def get(self, timeout: timedelta | None = None) -> tuple[int, bool, Any]:
        """Wait for the next message: its micro-batch, flag, and payload.

        Args:
            timeout: how long to wait; the timeout of the group by default.

        Raises:
            Cancelled: nothing more comes in this run; ``poisoned`` says why.
            ValueError: the structure of what has come cannot be read.
            UnreachableError: the connection has ended, or the message does not arrive in time.
        """
        microbatch, flag, tensors = self._take(timeout)
        return microbatch, flag, self._form.payload(tensors, self._device)

    def drain(self, most: int | None = None) -> None:
        """After a failed run: receive everything up to the message that says that nothing more comes.

        Args:
            most: the number of messages of the whole run after which nothing more comes either.
        """
        if self._direct is not None:
            self._direct.drain()
        with suppress(Cancelled):
            while most is None or self.taken.count < most:
                self._take(None)

    def _take(self, timeout: timedelta | None) -> tuple[int, bool, list[Tensor | None]]:
        """The next message: its micro-batch, flag, and tensors."""
        if self.poisoned is not None:
            raise Cancelled
        self._post()
        self.peer.wait(self._posted, timeout)
        self._posted = None
        microbatch, size, flag, taken, small = _LAYOUT.unpack_from(self._frame.memory)
        text = self._text(size, small, timeout) if size else b""
        if microbatch == POISON:
            self.poisoned = text
            raise Cancelled
        if text:
            self._form = pickle.loads(text)
            self._places = self._frame.places(self._form, _HEAD) if small and self._direct is None else []
        tensors = self._tensors(len(text), small, timeout)
        self.taken.count += 1
        if self._answers is not None:
            self._answers.arrived(taken)
        if self._expected > self.taken.count:
            self._post()  # the frame is free
        return microbatch, bool(flag), tensors

    def _text(self, size: int, small: int, timeout: timedelta | None) -> bytes:
        if small:
            return bytes(self._frame.memory[_HEAD : _HEAD + size])
        memory = bytearray(size)
        self.peer.wait(self.peer.receive(torch.frombuffer(memory, dtype=torch.uint8)), timeout)
        return bytes(memory)

    def _tensors(self, text: int, small: int, timeout: timedelta | None) -> list[Tensor | None]:
        """The tensors of a message of the present form, in memory of their own.

        Args:
            text: bytes of the form that comes before them.
            small: whether all of them are in the frame.
            timeout: how long to wait for each.
        """
        if self._direct is not None:
            return self._from_device(self._direct)
        if small:
            found = self._frame.places(self._form, _HEAD + text) if text else self._places
            return [None if each is None else self._own(each) for each in found]
        memory: list[Any] = [each and each.empty() for each in self._form.tensors]
        pairs = [(each, tensor) for each, tensor in zip(self._form.tensors, memory, strict=True) if each and each.size]
        for work in [self.peer.receive(each.data(tensor)) for each, tensor in pairs]:
            self.peer.wait(work, timeout)
        return [None if each is None else each.to(self._device) for each in memory]

    def _from_device(self, direct: Direct) -> list[Tensor | None]:
        sizes = [each.size for each in self._form.tensors if each is not None]
        parts = iter(direct.receive(sizes))
        return [None if each is None else each.within(next(parts).untyped_storage(), 0) for each in self._form.tensors]

    def _own(self, place: Tensor) -> Tensor:
        return place.clone() if self._device.type == "cpu" else place.to(self._device)

    def _post(self) -> None:
        """Start to receive the next message, so that it can arrive before :meth:`get` is called."""
        if self._posted is None:
            self._posted = self.peer.receive(self._frame.data)


class _Frame:
    """Memory that small messages are sent from, or received into.

    Attributes:
        memory: the memory, for reading and writing.
        data: the same as a uint8 tensor, for sending.
        form: the form of the messages that are sent from here.
        tensors: the tensors of that form, in this memory.
    """

    __slots__ = ("data", "form", "memory", "tensors")

    def __init__(self, size: int, form: Form | None = None) -> None:
        self.memory = bytearray(size)
        with torch.inference_mode(False):  # inference tensors could not be written to by runs outside of that mode
            self.data = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.form = form
        self.tensors = [] if form is None else self.places(form, _HEAD)

    def places(self, form: Form, begin: int) -> list[Tensor | None]:
        """The tensors of ``form`` in this memory, from ``begin`` on."""
        starts = iter(places(_sizes(form), begin)[0])
        storage = self.data.untyped_storage()
        return [each and filling(each).within(storage, next(starts) if each.size else 0) for each in form.tensors]


def places(sizes: Sequence[int], begin: int) -> tuple[list[int], int]:
    """The offsets of parts in a frame, and the end of the last.

    Args:
        sizes: the bytes of each part.
        begin: the offset after which the first part begins.
    """
    ends = [*accumulate(sizes, lambda end, size: -(-end // _ALIGN) * _ALIGN + size, initial=begin)]
    return [end - size for end, size in zip(ends[1:], sizes, strict=True)], ends[-1]


def _sizes(form: Form) -> list[int]:
    return [each.size for each in form.tensors if each is not None and each.size]


def _size(form: Form) -> int:
    """Bytes of a message of this form in one transfer, without the form."""
    return places(_sizes(form), _HEAD)[1]


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NOTHING


_NOTHING = torch.empty(0, dtype=torch.uint8)

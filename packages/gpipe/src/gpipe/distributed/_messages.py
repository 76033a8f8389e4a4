"""Messages between two ranks.

A message is a head, and the bytes of its tensors from their own memory into that of the tensors that arrive. Its form
(:mod:`gpipe.distributed._forms`) is sent only if it differs from that of the message before. So the other end can
receive the head and the tensors before it knows what comes; what differs announces itself::

    the same form    [head] [tensor] [tensor] ...
    the same, small  [head | tensor | tensor ...]
    another form     [head] [a byte for each tensor that the other end receives] [form] [tensor] [tensor] ...

    head = number of the micro-batch, bytes of the form, a flag, how many messages the sender has taken itself

The tensors of a small message are copied behind the head, because a transfer costs more than the copy. Tensors of
accelerators may go from device to device instead (:mod:`gpipe.distributed._wires`).

A message is kept until it is known that the other end took it: gloo does not tell without waiting, so each head says
how many messages were taken. Where nothing comes back, in a run without backwards, :meth:`RemoteLink.put` waits instead
when too many messages are under way.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..values._describe import Cancelled
from ._errors import UnreachableError
from ._forms import Form, Payload, flat, form_of

POISON: Final = -1
"""The micro-batch number of a message that says: nothing more comes in this run."""

SMALL: Final = 2**18
"""Bytes of the largest message that is copied into one transfer."""

_OBJECT: Final = -2
_HEAD = struct.Struct("=4q")
_ALIGN: Final = 16  # so that the data of any dtype are aligned, as is the end of a head
_CPU = torch.device("cpu")
_NONE = Form(None, ())
_FILLER = torch.zeros(1, dtype=torch.uint8)


class Peer:
    """A member of a group, as the other end of messages in both directions.

    Args:
        group: the process group that carries them.
        member: the number of the other end.
        out, into: the tags that distinguish messages to and from there from others between the two.
        number: the member's number in ``group``, if it is not ``member``.
        timeout: how long to wait for a message; the timeout of ``group`` by default.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        member: int,
        out: int,
        into: int,
        *,
        number: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.member = member
        self._number = member if number is None else number
        self._group = group
        self._out, self._into, self._timeout = out, into, timeout

    def send(self, data: Tensor) -> Any:
        """Start to send ``data``, which must not change until :meth:`wait` has returned."""
        try:
            return self._group.send([data], self._number, self._out)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None

    def receive(self, data: Tensor) -> Any:
        """Start to receive into ``data``, which may be larger than the message."""
        try:
            return self._group.recv([data], self._number, self._into)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None

    def wait(self, work: Any) -> None:
        """Wait until a transfer has ended."""
        try:
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None


class Direct(Protocol):
    """Sends tensors from device to device."""

    def send(self, data: Sequence[Tensor]) -> None: ...

    def receive(self, form: Form) -> list[Tensor | None]: ...

    def drain(self) -> None: ...


class _Layout:
    """How messages of one form are sent: if they are small, with tensors behind the head.

    Attributes:
        form: the form.
        starts: the offset of each tensor that has any bytes; None if these are sent by themselves.
        size: bytes of the first transfer.
        others: the number of further transfers.
    """

    def __init__(self, form: Form, *, direct: bool) -> None:
        self.form = form
        self.starts: list[int] | None = None
        self.size, self.others = _HEAD.size, 0
        if not direct:
            sizes = [each.shape.numel() * each.dtype.itemsize for each in form.tensors if each is not None]
            sizes = [size for size in sizes if size]
            ends = [*accumulate(sizes, lambda end, size: -(-end // _ALIGN) * _ALIGN + size, initial=_HEAD.size)]
            if ends[-1] > SMALL:
                self.others = len(sizes)
            else:
                self.starts, self.size = [end - size for end, size in zip(ends[1:], sizes, strict=True)], ends[-1]

    def within(self, frame: Tensor) -> list[Tensor | None]:
        """The tensors of a small message, in the memory of ``frame``."""
        starts, storage = iter(self.starts or ()), frame.untyped_storage()
        found: list[Tensor | None] = []
        for each in self.form.tensors:
            if each is None:
                found.append(None)
                continue
            start = next(starts) if each.shape.numel() else 0
            # Not as views: these would share a version counter.
            tensor = torch.empty(0, dtype=each.dtype, device="cpu")
            found.append(tensor.set_(storage, start // each.dtype.itemsize, each.shape, each.stride))
        return found


class _Coming(NamedTuple):
    """A message that is being received; ``frame`` begins with its head."""

    frame: Tensor
    tensors: list[Tensor | None]
    transfers: list[Any]


class RemoteLink:
    """Messages to and from one other rank: values of micro-batches and their gradients, or objects.

    Args:
        peer: the other end.
        device: the device of the tensors that are returned.
        out, into: what sends tensors there, and receives them, from device to device.

    Attributes:
        member: the number of the other rank.
        poisoned: the reason why nothing more comes in this run; None as long as messages come.
    """

    def __init__(
        self, peer: Peer, device: torch.device = _CPU, out: Direct | None = None, into: Direct | None = None
    ) -> None:
        self.member = peer.member
        self.poisoned: Any = None
        self._peer, self._device, self._out, self._into = peer, device, out, into
        # Of the last message in each direction.
        self._sent = _Layout(_NONE, direct=out is not None)
        self._received = _Layout(_NONE, direct=into is not None)
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()
        self._most: int | None = None
        self._arrived = self._taken = self._expected = 0  # messages since the link was made
        self._coming: _Coming | None = None

    def expect(self, messages: int, most: int | None = None) -> None:
        """Prepare for a run. If a connection has ended, :meth:`get` raises.

        Args:
            messages: how many come.
            most: how many may be under way before :meth:`put` waits for the oldest; None for any number.
        """
        self.poisoned, self._most = None, most
        self._expected = self._taken + messages
        self._look_ahead()

    def put(self, microbatch: int, payload: Payload, *, flag: bool = False) -> None:
        """Start to send the payload of a micro-batch."""
        form, tensors = form_of(payload)
        data = [flat(each) for each in tensors if each is not None and each.numel()]
        if self._out is not None:
            self._out.send(data)  # before the head, which says that they have been sent
            data = []
        again = form == self._sent.form
        self._send(microbatch, b"" if again else pickle.dumps(form), data, flag=flag)
        if not again:
            self._sent = _Layout(form, direct=self._out is not None)

    def poison(self, why: Any) -> None:
        """Tell the other end that nothing more comes in this run, and why: an object that can be pickled."""
        self._send(POISON, pickle.dumps(why))

    def tell(self, what: Any) -> None:
        """Start to send an object that can be pickled. Raises UnreachableError."""
        self._send(_OBJECT, pickle.dumps(what))

    def get(self) -> tuple[int, bool, Any]:
        """Wait for the next message: its micro-batch, flag, and payload.

        Raises:
            Cancelled: nothing more comes in this run; ``poisoned`` says why.
            UnreachableError: the connection has ended, or the message does not arrive in time.
        """
        microbatch, flag, tensors = self._take()
        return microbatch, flag, self._received.form.payload(tensors)

    def hear(self) -> Any:
        """Wait for the next object; see :meth:`get`."""
        head = self._next()[0]
        return pickle.loads(self._text(head[1]))

    def drain(self, *, expected: bool = False) -> None:
        """After a failed run: receive everything up to the message that says that nothing more comes.

        Args:
            expected: or, if there is none, up to the last message that is expected.
        """
        if self._into is not None:
            self._into.drain()
        with suppress(Cancelled):
            while not expected or self._taken < self._expected:
                self._take()

    def flush(self) -> None:
        """Wait until everything has been received."""
        while self._under_way:
            self._forget()

    def _send(self, microbatch: int, text: bytes, data: Sequence[Tensor] = (), *, flag: bool = False) -> None:
        starts = None if text else self._sent.starts
        memory = bytearray(self._sent.size if starts else _HEAD.size)
        _HEAD.pack_into(memory, 0, microbatch, len(text), flag, self._taken)
        parts = [torch.frombuffer(memory, dtype=torch.uint8)]
        if text:
            parts += [_FILLER] * self._sent.others
            parts.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if starts:
            for start, part in zip(starts, data, strict=True):
                place = torch.frombuffer(memory, dtype=part.dtype, count=part.numel(), offset=start)
                place.copy_(part.detach().view(-1))
        else:
            parts += [part.cpu() for part in data]
        self._under_way.append([(self._peer.send(part), part) for part in parts])
        while self._most is not None and len(self._under_way) > self._most:
            self._forget()

    def _forget(self) -> None:
        """Wait for the oldest message."""
        self._arrived += 1
        for work, _ in self._under_way.popleft():
            self._peer.wait(work)

    def _take(self) -> tuple[int, bool, list[Tensor | None]]:
        """The next message of a run: its micro-batch, flag, and tensors."""
        if self.poisoned is not None:
            raise Cancelled
        (microbatch, size, flag, taken), tensors = self._next()
        text = self._text(size) if size else b""
        if microbatch == POISON:
            self.poisoned = pickle.loads(text)
            raise Cancelled
        if text:
            self._received = _Layout(pickle.loads(text), direct=self._into is not None)
            tensors, transfers = self._begun()
            self._wait(transfers)
        if self._into is not None:
            tensors = self._into.receive(self._received.form)
        elif self._device.type != "cpu":
            tensors = [None if each is None else each.to(self._device) for each in tensors]
        while self._arrived < taken:
            self._forget()
        self._look_ahead()
        return microbatch, bool(flag), tensors

    def _look_ahead(self) -> None:
        """Start to receive the next message of the run before :meth:`get` is called, so that it can arrive."""
        if self._expected > self._taken:
            with suppress(UnreachableError):  # the next wait raises it
                self._begin()

    def _next(self) -> tuple[list[int], list[Tensor | None]]:
        """The head of the next message, and its tensors if it has the form of the one before."""
        frame, tensors, transfers = self._begin()
        self._wait(transfers)
        self._coming = None
        self._taken += 1
        return frame[: _HEAD.size].view(torch.int64).tolist(), tensors

    def _begin(self) -> _Coming:
        """Start to receive a message, unless that has begun."""
        if self._coming is None:
            frame = torch.empty(self._received.size, dtype=torch.uint8, device="cpu")
            first = self._peer.receive(frame)
            if self._received.starts is None:
                tensors, others = self._begun()
                self._coming = _Coming(frame, tensors, [first, *others])
            else:
                self._coming = _Coming(frame, self._received.within(frame), [first])
        return self._coming

    def _begun(self) -> tuple[list[Tensor | None], list[Any]]:
        """Memory for tensors of the last form, and the transfers into it."""
        if self._into is not None:
            return [], []
        tensors = self._received.form.empty(_CPU)
        memory = [flat(each) for each in tensors if each is not None and each.numel()]
        return tensors, [*map(self._peer.receive, memory)]

    def _text(self, size: int) -> bytes:
        memory = bytearray(size)
        self._wait([self._peer.receive(torch.frombuffer(memory, dtype=torch.uint8))])
        return bytes(memory)

    def _wait(self, transfers: Sequence[Any]) -> None:
        for work in transfers:
            self._peer.wait(work)

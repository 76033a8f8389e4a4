"""Messages between two ranks.

A message is a head, and the bytes of its tensors. Its form (:mod:`gpipe.distributed._forms`) is sent only if it differs
from that of the message before, so that the other end can receive head and tensors before it knows what comes::

    the same form    [head] [tensor] [tensor] ...   from the memory of the tensors into that of those that arrive
    the same, small  [head and tensors]             a transfer costs more than copies
    another form     [head] [a byte for each tensor that the other end receives] [form], then as above

    head = number of the micro-batch, bytes of the form, a flag, how many messages the sender has taken itself

Tensors of accelerators may go from device to device instead (:mod:`gpipe.distributed._wires`). A message is kept until
a head says that the other end took it. In a run without backwards, :meth:`RemoteLink.put` waits when too many messages
are under way.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..values._describe import Cancelled
from ._errors import UnreachableError
from ._forms import Form, Payload, bytes_of, form_of

SMALL: Final = 2**18
"""Bytes of the largest tensors that are copied behind their head."""

_POISON, _OBJECT, _FORM = -1, -2, -3  # in place of a micro-batch: of messages that have a text, and no tensors
_HEAD: Final = 32  # bytes of four int64
_CPU = torch.device("cpu")
_FILLER = torch.zeros(1, dtype=torch.uint8)


class Peer:
    """A member of a group, as the other end of messages in both directions.

    Args:
        out, into: the tags of messages to and from there.
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
        try:
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None


class Direct(Protocol):
    """Sends tensors from device to device."""

    def send(self, data: Sequence[Tensor]) -> None: ...

    def receive(self, form: Form) -> list[Tensor | None]: ...

    def drain(self) -> None: ...


class _Coming(NamedTuple):
    """A message that is being received. ``frame`` begins with its head; behind it are small tensors."""

    frame: Tensor
    tensors: list[Tensor | None] | None
    transfers: list[Any]


class RemoteLink:
    """Messages to and from one other rank: values of micro-batches and their gradients, or objects.

    Args:
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
        self._sent = self._received = Form(None, ())  # of the last message in each direction
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()
        self._most: int | None = None
        self._arrived = self._taken = self._expected = 0  # messages since the link was made
        self._coming: _Coming | None = None

    def expect(self, messages: int, most: int | None = None) -> None:
        """Prepare for a run with that many messages; ``most`` may be under way before :meth:`put` waits."""
        self.poisoned, self._most = None, most
        self._expected = self._taken + messages
        self._look_ahead()

    def put(self, microbatch: int, payload: Payload, *, flag: bool = False) -> None:
        """Start to send the payload of a micro-batch."""
        form, tensors = form_of(payload)
        if self._out is not None:  # before the head, which says that it is done
            self._out.send([each for each in tensors if each is not None])
            tensors = []
        parts = [] if form == self._sent else self._text(_FORM, form)
        self._sent = form
        message = [self._head(microbatch, flag=flag), *[each.cpu() for each in bytes_of(tensors)]]
        self._send([*parts, torch.cat(message)] if sum(form.sizes) <= SMALL else [*parts, *message])

    def poison(self, why: Any) -> None:
        """Tell the other end that nothing more comes in this run, and why: an object that can be pickled."""
        self._send(self._text(_POISON, why))

    def tell(self, what: Any) -> None:
        self._send(self._text(_OBJECT, what))

    def get(self) -> tuple[int, bool, Any]:
        """Wait for the next message: its micro-batch, flag, and payload.

        Raises:
            Cancelled: nothing more comes in this run; ``poisoned`` says why.
            UnreachableError: the connection has ended, or the message does not arrive in time.
        """
        microbatch, flag, tensors = self._take()
        return microbatch, flag, self._received.payload(tensors)

    def hear(self) -> Any:
        return pickle.loads(self._next()[1])

    def drain(self, *, expected: bool = False) -> None:
        """After a failed run: receive up to the message that ends it, or the last ``expected`` one."""
        if self._into is not None:
            self._into.drain()
        with suppress(Cancelled):
            while not expected or self._taken < self._expected:
                self._take()

    def flush(self) -> None:
        while self._under_way:
            self._forget()

    def _head(self, microbatch: int, size: int = 0, *, flag: bool = False) -> Tensor:
        head = [microbatch, size, flag, self._taken]
        return torch.tensor(head, dtype=torch.int64, device="cpu").view(torch.uint8)

    def _text(self, kind: int, what: Any) -> list[Tensor]:
        """A message of that kind, in place of one with tensors, which the other end has begun to receive."""
        text = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8)
        sizes = self._sent.sizes
        others = 0 if self._out is not None or sum(sizes) <= SMALL else len(sizes)
        return [self._head(kind, len(text)), *[_FILLER] * others, text]

    def _send(self, parts: Sequence[Tensor]) -> None:
        self._under_way.append([(self._peer.send(part), part) for part in parts])
        while self._most is not None and len(self._under_way) > self._most:
            self._forget()

    def _forget(self) -> None:
        self._arrived += 1
        for work, _ in self._under_way.popleft():
            self._peer.wait(work)

    def _take(self) -> tuple[int, bool, list[Tensor | None]]:
        """The next message of a run: its micro-batch, flag, and tensors."""
        if self.poisoned is not None:
            raise Cancelled
        (microbatch, _, flag, taken), text, (frame, tensors, _) = self._next()
        if microbatch == _POISON:
            self.poisoned = pickle.loads(text)
            raise Cancelled
        if self._into is not None:
            tensors = self._into.receive(self._received)
        elif tensors is None:
            tensors = self._received.empty(self._device)
            self._fill(tensors, frame[_HEAD:])
        elif self._device.type != "cpu":
            tensors = [None if each is None else each.to(self._device) for each in tensors]
        while self._arrived < taken:
            self._forget()
        self._look_ahead()
        return microbatch, bool(flag), tensors

    def _fill(self, tensors: Sequence[Tensor | None], data: Tensor) -> None:
        """Copy what came behind a head. As views of it, tensors would share a version counter."""
        for part in bytes_of(tensors):
            part.copy_(data[: len(part)])
            data = data[len(part) :]

    def _look_ahead(self) -> None:
        """Start to receive the next message of the run before :meth:`get` is called."""
        if self._expected > self._taken:
            with suppress(UnreachableError):  # the next wait raises it
                self._begin()

    def _next(self) -> tuple[list[int], bytearray, _Coming]:
        """The head of the next message, its text if it has one, and its tensors if it has not."""
        while True:
            coming = self._begin()
            for work in coming.transfers:
                self._peer.wait(work)
            self._coming = None
            head = coming.frame[:_HEAD].view(torch.int64).tolist()
            text = bytearray(head[1])
            if text:
                self._peer.wait(self._peer.receive(torch.frombuffer(text, dtype=torch.uint8)))
            if head[0] != _FORM:
                self._taken += 1
                return head, text, coming
            self._received = pickle.loads(text)

    def _begin(self) -> _Coming:
        if self._coming is None:
            size = 0 if self._into is not None else sum(self._received.sizes)
            frame = torch.empty(_HEAD + (size if size <= SMALL else 0), dtype=torch.uint8, device="cpu")
            tensors = None if size <= SMALL else self._received.empty(_CPU)
            memory = [frame, *bytes_of(tensors or [])]
            self._coming = _Coming(frame, tensors, [*map(self._peer.receive, memory)])
        return self._coming

"""Point-to-point messages between two ranks.

A message consists of a frame and its large tensors. The receive of a frame is posted before its content is known. The
receives of large tensors are posted too, for the form (:mod:`gpipe.distributed._forms`) of the previous message::

    small tensors   [head, tensors]               a transfer costs more than copies
    large tensors   [head] [tensor] [tensor] ...  sent from and received into the memory of tensors, without a copy
    a new form      [head, form, tensors]         or [head, form] [tensor] [tensor] ...
    an object       [head, object]

    head = index of the micro-batch, bytes of form or object, a flag, the number of messages the sender has received

A long form or object follows its frame in a separate transfer. After a frame with a form or object, one byte is sent
for each posted receive, that is, for each large tensor of the previous form.

A send is fast if the other end has already posted its receive, which it announces by a transfer. For each transfer, a
gloo thread wakes up and takes CPU time from a computing stage. So :meth:`RemoteLink.put` posts receives two messages
ahead: the thread at the other end wakes up once for the announcement and the message.

Tensors on accelerators may be sent from device to device instead: see :mod:`gpipe.distributed._device_links`. A message
is kept until a head reports that the other end has received it. In a run without backwards,
:meth:`RemoteLink.put` waits if too many messages are in flight.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..values._describe import Cancelled
from ._errors import UnreachableError
from ._forms import Form, Payload, flatten_payload, view_as_bytes

SMALL: Final = 2**18
"""A message's tensors are copied into its frame if their total size, in bytes, is at most this."""

ROOM: Final = 2**12
"""A form or object is copied into the frame if its size, in bytes, is at most this."""

_POISON, _OBJECT = -1, -2  # replace the micro-batch in messages that have an object and no tensors
_HEAD: Final = 32  # bytes of four int64
_BESIDE: Final = 2**19  # added to the tag of a frame for the transfers that follow it
_AHEAD: Final = 2  # frames whose receives are posted in advance
_CPU = torch.device("cpu")
_FILLER = torch.zeros(1, dtype=torch.uint8)


class Peer:
    """The member of a group at the other end of messages in both directions.

    Args:
        group: the process group that carries the messages.
        member: the index of the member in its pipeline.
        out, into: the tags of frames to and from the member. Transfers that follow a frame have different tags.
        number: the rank of the member in ``group``, if it is not ``member``.
        timeout: how long to wait for a message; by default the timeout of ``group``.
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

    def send(self, data: Tensor, beside: int = 0) -> Any:
        """Start to send ``data``, which must not change until :meth:`wait` returns."""
        return self._try(self._group.send, [data], self._number, self._out + beside)

    def receive(self, data: Tensor, beside: int = 0) -> Any:
        """Start to receive into ``data``, which may be larger than the message."""
        return self._try(self._group.recv, [data], self._number, self._into + beside)

    def wait(self, work: Any) -> None:
        self._try(work.wait, *(() if self._timeout is None else (self._timeout,)))

    def _try(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None


class Direct(Protocol):
    """Sends tensors from device to device."""

    def send(self, data: Sequence[Tensor]) -> None: ...

    def receive(self, form: Form) -> list[Tensor | None]: ...

    def drain(self) -> None: ...


class RemoteLink:
    """Messages to and from one other rank: values of micro-batches and their gradients, or objects.

    Args:
        peer: the other rank.
        device: the device of the received tensors.
        out, into: send tensors to the other rank, and receive them, from device to device; None to use host memory.
        small: the maximum total size, in bytes, of a message's tensors that are part of its frame; equal at both ends.
        most: the maximum number of messages in flight in a run without messages back: :meth:`put` waits while there are
            more. None at the end that receives these messages.

    Attributes:
        member: the index of the other rank.
        poisoned: the reason why no more messages arrive in this run; None until then.
    """

    def __init__(
        self,
        peer: Peer,
        device: torch.device = _CPU,
        out: Direct | None = None,
        into: Direct | None = None,
        small: int = SMALL,
        most: int | None = None,
    ) -> None:
        self.member = peer.member
        self.poisoned: Any = None
        self._peer, self._device, self._out, self._into, self._small = peer, device, out, into, small
        self._sent = self._received = Form(None, ())  # the form of the last message in each direction
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()
        self._most, self._limit = most, most
        self._arrived = self._taken = self._expected = 0  # numbers of messages since the link was created
        self._coming: deque[tuple[Any, Tensor]] = deque()  # posted receives of frames
        self._free: list[Tensor] = []  # frames that have been read
        self._large: tuple[list[Any], list[Tensor | None]] | None = None  # posted receives of the next large tensors

    def expect(self, messages: int, *, back: bool = True) -> None:
        """Prepare for a run with this many ``messages`` in each direction, or in one direction if not ``back``."""
        self.poisoned, self._limit = None, None if back else self._most
        self._expected = self._taken + (messages if back or self._most is None else 0)
        if self._expected > self._taken:
            self._look_ahead(_AHEAD)

    def put(self, microbatch: int, payload: Payload, *, flag: bool = False) -> None:
        """Start to send the payload of a micro-batch."""
        form, tensors = flatten_payload(payload)
        if self._out is not None:  # before the head, which announces that the transfers are queued
            self._out.send([each for each in tensors if each is not None])
            tensors = []
        text = b"" if form == self._sent else pickle.dumps(form)
        self._send(microbatch, text, form, [each.cpu() for each in view_as_bytes(tensors)], flag=flag)

    def poison(self, why: Any) -> None:
        """Send ``why``, a picklable object, as the last message of this run: the reason why no more follow."""
        self._send(_POISON, pickle.dumps(why), self._sent)

    def tell(self, pickled: bytes) -> None:
        """Send a pickled object outside a run."""
        self._send(_OBJECT, pickled, self._sent)

    def get(self) -> tuple[int, bool, Any]:
        """Wait for the next message, and return its micro-batch, flag and payload.

        Raises:
            Cancelled: no more messages arrive in this run; ``poisoned`` is the reason.
            UnreachableError: the connection was closed, or the message does not arrive in time.
        """
        microbatch, flag, tensors = self._take()
        return microbatch, flag, self._received.payload(tensors)

    def receive(self) -> Any:
        return self._next()[1]

    def drain(self, *, expected: bool = False) -> None:
        """Drain a failed run: receive until its final message, or the last ``expected`` one."""
        if self._into is not None:
            self._into.drain()
        with suppress(Cancelled):
            while not expected or self._taken < self._expected:
                self._take()

    def flush(self) -> None:
        while self._under_way:
            self._forget()

    def _send(self, kind: int, text: bytes, form: Form, data: Sequence[Tensor] = (), *, flag: bool = False) -> None:
        head = torch.tensor([kind, len(text), flag, self._taken], dtype=torch.int64, device="cpu").view(torch.uint8)
        frame, behind = [head], []
        if text:
            behind += [_FILLER] * self._apart(self._sent, self._out)  # complete the receives posted at the other end
            (frame if len(text) <= ROOM else behind).append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        (behind if self._apart(form, self._out) else frame).extend(data)
        self._sent = form
        self._look_ahead(_AHEAD)
        whole = torch.cat(frame)
        transfers = [(self._peer.send(whole), whole)]
        self._under_way.append([*transfers, *[(self._peer.send(part, _BESIDE), part) for part in behind]])
        while self._limit is not None and len(self._under_way) > self._limit:
            self._forget()

    def _apart(self, form: Form, direct: Direct | None) -> int:
        """Return the number of tensors of a message that are not part of its frame."""
        return len(form.sizes) if direct is None and sum(form.sizes) > self._small else 0

    def _forget(self) -> None:
        self._arrived += 1
        for work, _ in self._under_way.popleft():
            self._peer.wait(work)

    def _take(self) -> tuple[int, bool, list[Tensor | None]]:
        """Wait for the next message of a run, and return its micro-batch, flag and tensors."""
        if self.poisoned is not None:
            raise Cancelled
        (microbatch, _, flag, taken), failure, data, tensors = self._next()
        if microbatch == _POISON:
            self.poisoned = failure
            raise Cancelled
        if self._into is not None:
            tensors = self._into.receive(self._received)
        elif tensors is None:
            tensors = self._received.empty(self._device)
            self._fill(tensors, data)
        elif self._device.type != "cpu":
            tensors = [None if each is None else each.to(self._device) for each in tensors]
        while self._arrived < taken:
            self._forget()
        self._look_ahead(1)
        return microbatch, bool(flag), tensors

    def _fill(self, tensors: Sequence[Tensor | None], data: Tensor) -> None:
        """Copy the tensors from a frame: if they were views of it, they would share a version counter."""
        for part in view_as_bytes(tensors):
            part.copy_(data[: len(part)])
            data = data[len(part) :]

    def _look_ahead(self, frames: int) -> None:
        """Post the receives of up to this many ``frames``, and of the next message's large tensors, before ``get``."""
        with suppress(UnreachableError):  # the next wait raises it
            self._begin(frames)
            if self._expected > self._taken:
                self._begin_large()

    def _begin(self, frames: int) -> None:
        while len(self._coming) < frames:
            with torch.inference_mode(False):  # frames are reused, even outside inference mode
                size = _HEAD + ROOM + self._small
                frame = self._free.pop() if self._free else torch.empty(size, dtype=torch.uint8, device="cpu")
            self._coming.append((self._peer.receive(frame), frame))

    def _begin_large(self) -> None:
        if self._large is None and self._apart(self._received, self._into):
            tensors = self._received.empty(_CPU)
            self._large = [self._peer.receive(part, _BESIDE) for part in view_as_bytes(tensors)], tensors

    def _take_large(self) -> list[Tensor | None] | None:
        """Wait for the tensors that are not part of a frame. Return None if messages of this form have none."""
        self._begin_large()
        if self._large is None:
            return None
        (works, tensors), self._large = self._large, None
        for work in works:
            self._peer.wait(work)
        return tensors

    def _next(self) -> tuple[list[int], Any, Tensor, list[Tensor | None] | None]:
        """Wait for the next message, and return its head, its form or object, the rest of its frame, and large tensors.

        The frame is overwritten when this link posts its next receive.
        """
        self._begin(1)
        work, frame = self._coming.popleft()
        self._peer.wait(work)
        self._free.append(frame)
        self._taken += 1
        head, data = frame[:_HEAD].view(torch.int64).tolist(), frame[_HEAD:]
        message, tensors = None, self._take_large()
        if head[1]:
            message = pickle.loads(self._text(head[1], data))
            data = data[head[1] if head[1] <= ROOM else 0 :]
            if head[0] >= 0:
                self._received = message
                tensors = self._take_large()
        return head, message, data, tensors

    def _text(self, size: int, data: Tensor) -> bytearray:
        text = bytearray(size)
        into = torch.frombuffer(text, dtype=torch.uint8)
        if size <= ROOM:
            into.copy_(data[:size])
        else:
            self._peer.wait(self._peer.receive(into, _BESIDE))
        return text

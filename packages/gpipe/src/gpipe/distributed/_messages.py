"""Messages between two ranks.

A message is a frame, and its large tensors. Frames are received before it is known what comes in them, and so are large
tensors of the same form (:mod:`gpipe.distributed._forms`) as those before::

    small tensors   [head, tensors]               a transfer costs more than copies
    large tensors   [head] [tensor] [tensor] ...  from the memory of the tensors into that of those that arrive
    another form    [head, form, tensors]         or [head, form] [tensor] [tensor] ...
    an object       [head, object]

    head = number of the micro-batch, bytes of form or object, a flag, how many messages the sender has taken itself

A long form or object comes behind its frame. Behind one with a form or object, a byte is sent in place of each large
tensor of the form before.

A send is fast if the other end has begun to receive, which it tells by a transfer. For each transfer a thread of gloo's
wakes up, and takes the processor from a stage that computes. So :meth:`RemoteLink.put` begins to receive two messages
ahead: the thread at the other end wakes up once for that and what is sent.

Tensors of accelerators may go from device to device instead (:mod:`gpipe.distributed._wires`). A message is kept until
a head says that the other end took it. In a run without backwards, :meth:`RemoteLink.put` waits when too many messages
are under way.
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
from ._forms import Form, Payload, bytes_of, form_of

SMALL: Final = 2**18
"""Bytes of the largest tensors that are copied behind their head."""

ROOM: Final = 2**12
"""Bytes of the longest form or object that is copied behind its head."""

_POISON, _OBJECT = -1, -2  # in place of a micro-batch: of messages that have an object, and no tensors
_HEAD: Final = 32  # bytes of four int64
_BESIDE: Final = 2**19  # what the tags of transfers behind a frame are more than that of frames
_AHEAD: Final = 2  # frames that are received before they are asked for
_CPU = torch.device("cpu")
_FILLER = torch.zeros(1, dtype=torch.uint8)


class Peer:
    """A member of a group, as the other end of messages in both directions.

    Args:
        out, into: the tags of messages to and from there; what is sent beside them has others.
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

    def send(self, data: Tensor, beside: int = 0) -> Any:
        """Start to send ``data``, which must not change until :meth:`wait` has returned."""
        return self._tried(self._group.send, [data], self._number, self._out + beside)

    def receive(self, data: Tensor, beside: int = 0) -> Any:
        """Start to receive into ``data``, which may be larger than the message."""
        return self._tried(self._group.recv, [data], self._number, self._into + beside)

    def wait(self, work: Any) -> None:
        self._tried(work.wait, *(() if self._timeout is None else (self._timeout,)))

    def _tried(self, call: Callable[..., Any], *given: Any) -> Any:
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
        device: the device of the tensors that are returned.
        out, into: what sends tensors there, and receives them, from device to device.
        small: bytes of the largest tensors that are part of a frame; the same at both ends.
        most: how many messages may be under way before :meth:`put` waits, in a run in which nothing comes back; None at
            the end to which these messages go.

    Attributes:
        member: the number of the other rank.
        poisoned: the reason why nothing more comes in this run; None as long as messages come.
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
        self._sent = self._received = Form(None, ())  # of the last message in each direction
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()
        self._most, self._limit = most, most
        self._arrived = self._taken = self._expected = 0  # messages since the link was made
        self._coming: deque[tuple[Any, Tensor]] = deque()  # frames, with their transfers
        self._free: list[Tensor] = []  # frames that have been read
        self._large: tuple[list[Any], list[Tensor | None]] | None = None  # tensors behind the next frame, likewise

    def expect(self, messages: int, *, back: bool = True) -> None:
        """Prepare for a run with so many messages in each direction, or without those that come ``back``."""
        self.poisoned, self._limit = None, None if back else self._most
        self._expected = self._taken + (messages if back or self._most is None else 0)
        if self._expected > self._taken:
            self._look_ahead(_AHEAD)

    def put(self, microbatch: int, payload: Payload, *, flag: bool = False) -> None:
        """Start to send the payload of a micro-batch."""
        form, tensors = form_of(payload)
        if self._out is not None:  # before the head, which says that it is done
            self._out.send([each for each in tensors if each is not None])
            tensors = []
        text = b"" if form == self._sent else pickle.dumps(form)
        self._send(microbatch, text, form, [each.cpu() for each in bytes_of(tensors)], flag=flag)

    def poison(self, why: Any) -> None:
        """Tell the other end that nothing more comes in this run, and why: an object that can be pickled."""
        self._send(_POISON, pickle.dumps(why), self._sent)

    def tell(self, pickled: bytes) -> None:
        """Send an object outside of a run."""
        self._send(_OBJECT, pickled, self._sent)

    def get(self) -> tuple[int, bool, Any]:
        """Wait for the next message: its micro-batch, flag, and payload.

        Raises:
            Cancelled: nothing more comes in this run; ``poisoned`` says why.
            UnreachableError: the connection has ended, or the message does not arrive in time.
        """
        microbatch, flag, tensors = self._take()
        return microbatch, flag, self._received.payload(tensors)

    def hear(self) -> Any:
        return self._next()[1]

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

    def _send(self, kind: int, text: bytes, form: Form, data: Sequence[Tensor] = (), *, flag: bool = False) -> None:
        head = torch.tensor([kind, len(text), flag, self._taken], dtype=torch.int64, device="cpu").view(torch.uint8)
        frame, behind = [head], []
        if text:
            behind += [_FILLER] * self._apart(self._sent, self._out)  # what the other end has begun to receive
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
        """How many tensors of a message are not part of its frame."""
        return len(form.sizes) if direct is None and sum(form.sizes) > self._small else 0

    def _forget(self) -> None:
        self._arrived += 1
        for work, _ in self._under_way.popleft():
            self._peer.wait(work)

    def _take(self) -> tuple[int, bool, list[Tensor | None]]:
        """The next message of a run: its micro-batch, flag, and tensors."""
        if self.poisoned is not None:
            raise Cancelled
        (microbatch, _, flag, taken), told, data, tensors = self._next()
        if microbatch == _POISON:
            self.poisoned = told
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
        """Copy what came in a frame. As views of it, tensors would share a version counter."""
        for part in bytes_of(tensors):
            part.copy_(data[: len(part)])
            data = data[len(part) :]

    def _look_ahead(self, frames: int) -> None:
        """Start to receive so many frames, and the large tensors of the next message of the run, before ``get``."""
        with suppress(UnreachableError):  # the next wait raises it
            self._begin(frames)
            if self._expected > self._taken:
                self._begin_large()

    def _begin(self, frames: int) -> None:
        while len(self._coming) < frames:
            with torch.inference_mode(False):  # a frame is used again, outside of that mode too
                size = _HEAD + ROOM + self._small
                frame = self._free.pop() if self._free else torch.empty(size, dtype=torch.uint8, device="cpu")
            self._coming.append((self._peer.receive(frame), frame))

    def _begin_large(self) -> None:
        if self._large is None and self._apart(self._received, self._into):
            tensors = self._received.empty(_CPU)
            self._large = [self._peer.receive(part, _BESIDE) for part in bytes_of(tensors)], tensors

    def _take_large(self) -> list[Tensor | None] | None:
        """The tensors that are not part of a frame, if messages of this form have such."""
        self._begin_large()
        if self._large is None:
            return None
        (works, tensors), self._large = self._large, None
        for work in works:
            self._peer.wait(work)
        return tensors

    def _next(self) -> tuple[list[int], Any, Tensor, list[Tensor | None] | None]:
        """The next message: its head, what it tells, and its tensors: their bytes, or those that are large.

        The bytes are in a frame, which is overwritten when this link begins to receive again.
        """
        self._begin(1)
        work, frame = self._coming.popleft()
        self._peer.wait(work)
        self._free.append(frame)
        self._taken += 1
        head, data = frame[:_HEAD].view(torch.int64).tolist(), frame[_HEAD:]
        told, tensors = None, self._take_large()
        if head[1]:
            told = pickle.loads(self._text(head[1], data))
            data = data[head[1] if head[1] <= ROOM else 0 :]
            if head[0] >= 0:
                self._received = told
                tensors = self._take_large()
        return head, told, data, tensors

    def _text(self, size: int, data: Tensor) -> bytearray:
        text = bytearray(size)
        into = torch.frombuffer(text, dtype=torch.uint8)
        if size <= ROOM:
            into.copy_(data[:size])
        else:
            self._peer.wait(self._peer.receive(into, _BESIDE))
        return text

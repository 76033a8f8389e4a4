"""Messages from one rank to another, over one direction of a channel.

A message is a head, perhaps the text of its form, and the data of tensors, unless these go from device to device
(:mod:`gpipe.distributed._wires`). A small one is a single transfer, since each has to be waited for; the parts of a
large one are transfers of their own, into memory of their own::

    [microbatch, form, bytes of its text, flag, 1 | text | data | data ...]
    [microbatch, form, bytes of its text, flag, 0]  [text]  [data]  [data] ...

Both ends number the forms (:mod:`gpipe.distributed._forms`) that have passed, so that the text of each comes once,
with the sizes of the data before it: what has been sent is received, also by who cannot read the form.
"""

from __future__ import annotations

import json
import struct
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

SMALL: Final = 2**15
"""Bytes of a message that is sent in one transfer. A receiver has memory for so many ready before it comes."""

POISON: Final = -1
"""In the place of a micro-batch: nothing more comes in this run."""

_MOST = 1024
"""Forms that are remembered. Where each message has another one, as sparse gradients have, they are forgotten."""

_LAYOUT = struct.Struct("=5q")
_HEAD = _LAYOUT.size
_ALIGN = 16  # so that the data of any dtype can be looked at in place


class Peer:
    """A member of a group, as the other end of messages with one tag.

    Args:
        group: over which they go.
        member: who it is.
        tag: of these messages, among all between the two.
        number: of the member in ``group``, if that is not ``member``.
    """

    def __init__(self, group: dist.ProcessGroup, member: int, tag: int, *, number: int | None = None) -> None:
        self.member = member
        self._number = member if number is None else number
        self._group = group
        self._tag = tag

    def send(self, data: Tensor) -> Any:
        """Begin to send; ``data`` must stay as it is until this has been waited for."""
        try:
            return self._group.send([data], self._number, self._tag)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None

    def receive(self, data: Tensor) -> Any:
        """Begin to receive into ``data``, which may be larger than what comes."""
        try:
            return self._group.recv([data], self._number, self._tag)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None

    def wait(self, work: Any, timeout: timedelta | None = None) -> None:
        """Wait until a transfer is done; for as long as the group does if there is no ``timeout``."""
        try:
            work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as error:
            raise UnreachableError(self.member, error) from None


class Direct(Protocol):
    """Takes the data of messages from device to device."""

    def send(self, data: Sequence[Tensor]) -> None: ...

    def receive(self, sizes: Sequence[int]) -> list[Tensor]: ...

    def drain(self) -> None: ...


class Sender:
    """The near end. Nothing but :meth:`forget` and :meth:`flush` waits.

    Args:
        peer: the far end.
        direct: takes the data of tensors; None if they go by way of host memory.
    """

    def __init__(self, peer: Peer, direct: Direct | None = None) -> None:
        self.peer = peer
        self._direct = direct
        self._forms: dict[Form, int] = {}
        self._under_way: dict[int, list[tuple[Any, Tensor]]] = {}

    def put(self, microbatch: int, payload: Any, *, flag: bool = False) -> None:
        """Send the payload of a micro-batch on its way."""
        form, data = form_of(payload)
        text = b""
        if form not in self._forms:
            if len(self._forms) >= _MOST:
                self._forms.clear()
            self._forms[form] = len(self._forms)
            text = f"{json.dumps(form.sizes)}\n{form.text}".encode()
        if self._direct is not None:
            self._direct.send(data)  # before the head, which says that they come
            data = []
        self._send(microbatch, (microbatch, self._forms[form], len(text), flag), [_bytes(text), *data])

    def poison(self, why: bytes) -> None:
        """Say that nothing more comes in this run, and why."""
        self._send(POISON, (POISON, 0, len(why), False), [_bytes(why)])

    def forget(self, microbatch: int) -> None:
        """Let the memory go of what has been sent for a micro-batch, which has arrived, or soon will."""
        for work, _ in self._under_way.pop(microbatch, ()):
            self.peer.wait(work)

    def flush(self) -> None:
        """Wait until everything has arrived."""
        for microbatch in [*self._under_way]:
            self.forget(microbatch)

    def _send(self, microbatch: int, head: tuple[int, int, int, bool], parts: Sequence[Tensor]) -> None:
        parts = [part.cpu() for part in parts if part.numel()]
        sizes = [part.numel() for part in parts]  # len() of a tensor goes through Python
        places, total = _places(sizes)
        small = total <= SMALL
        memory = bytearray(total if small else _HEAD)
        _LAYOUT.pack_into(memory, 0, *head, small)
        frame = torch.frombuffer(memory, dtype=torch.uint8)
        if small:
            for place, size, part in zip(places, sizes, parts, strict=True):
                frame[place : place + size].copy_(part)
            parts = ()
        transfers = [(self.peer.send(part), part) for part in (frame, *parts)]
        self._under_way.setdefault(microbatch, []).extend(transfers)


class Receiver:
    """The far end.

    Args:
        peer: the near end.
        device: where tensors are put.
        direct: as of the sender.

    Attributes:
        poisoned: why nothing more comes in this run; None while something does.
    """

    def __init__(self, peer: Peer, device: torch.device, direct: Direct | None = None) -> None:
        self.peer = peer
        self.poisoned: bytes | None = None
        self._device = device
        self._direct = direct
        self._forms: list[_Known] = []
        self._expected = 0
        self._posted: tuple[Any, Tensor, bytearray] | None = None

    def expect(self, messages: int) -> None:
        """A run begins, in which so many messages come."""
        self._expected = messages
        self.poisoned = None
        if messages:
            self._post()

    def get(self) -> tuple[int, bool, Any]:
        """Wait for the next message: its micro-batch, flag, and payload.

        Raises:
            Cancelled: nothing more comes; ``poisoned`` says why.
        """
        if self.poisoned is not None:
            raise Cancelled
        frame, memory = self._frame()
        microbatch, number, size, flag, small = _LAYOUT.unpack_from(memory)
        parts = _Parts(self.peer, frame if small else None)
        text = parts.take([size])[0] if size else _NOTHING
        if microbatch == POISON:
            self.poisoned = bytes(text.tolist())
            raise Cancelled
        if size:
            if number == 0:  # the sender has begun anew
                self._forms.clear()
            self._forms.append(_Known(bytes(text.tolist()).decode()))
        known = self._forms[number]
        data = parts.take(known.sizes) if self._direct is None else self._direct.receive(known.sizes)
        self._expected -= 1
        if self._expected > 0:
            self._post()
        return microbatch, bool(flag), known.form().rebuild([part.to(self._device) for part in data])

    def drain(self) -> None:
        """After a run that has failed: take everything up to the poison."""
        if self._direct is not None:
            self._direct.drain()
        with suppress(Cancelled):
            while True:
                self.get()

    def _frame(self) -> tuple[Tensor, bytearray]:
        self._post()
        assert self._posted is not None
        work, frame, memory = self._posted
        self.peer.wait(work)
        self._posted = None
        return frame, memory

    def _post(self) -> None:
        """Have memory ready for the next message, so that it may come before anybody asks for it."""
        if self._posted is None:
            memory = bytearray(SMALL)
            frame = torch.frombuffer(memory, dtype=torch.uint8)
            self._posted = self.peer.receive(frame), frame, memory


class _Known:
    """A form that has come, read when it is first asked for: what cannot be read is an error each time."""

    def __init__(self, text: str) -> None:
        sizes, _, self._text = text.partition("\n")
        self.sizes: list[int] = json.loads(sizes)
        self._form: Form | None = None

    def form(self) -> Form:
        if self._form is None:
            self._form = Form.parse(self._text)
        return self._form


class _Parts:
    """What follows the head of a message: in its ``frame``, or in transfers of their own if there is none."""

    def __init__(self, peer: Peer, frame: Tensor | None) -> None:
        self._peer = peer
        self._frame = frame
        self._end = _HEAD

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """The next ones, of so many bytes, each in memory of its own."""
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        present = [(size, part) for size, part in zip(sizes, parts, strict=True) if size]
        if self._frame is None:
            for work in [self._peer.receive(part) for _, part in present]:
                self._peer.wait(work)
        else:
            places, self._end = _places([size for size, _ in present], self._end)
            for place, (size, part) in zip(places, present, strict=True):
                part.copy_(self._frame[place : place + size])
        return parts


def _places(sizes: Sequence[int], begin: int = _HEAD) -> tuple[list[int], int]:
    """Where in a frame parts of these sizes begin, after ``begin``, and where the last one ends."""
    ends = [*accumulate(sizes, lambda end, size: -(-end // _ALIGN) * _ALIGN + size, initial=begin)]
    return [end - size for end, size in zip(ends[1:], sizes, strict=True)], ends[-1]


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NOTHING


_NOTHING = torch.empty(0, dtype=torch.uint8)

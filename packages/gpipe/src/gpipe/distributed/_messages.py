"""Messages from one rank to another, in one direction of a channel.

A message has a head, the text of its form if the receiver does not know it yet, and the data of its tensors, unless
these go from device to device (:mod:`gpipe.distributed._wires`). A small message is one transfer, since each transfer
costs a wait; the parts of a large one are separate transfers, into memory of their own::

    [microbatch, form, bytes of its text, flag, 1 | text | data | data ...]
    [microbatch, form, bytes of its text, flag, 0]  [text]  [data]  [data] ...

Both ends number the forms (:mod:`gpipe.distributed._forms`) in the order in which they appear, so the text of each is
sent once. The sizes of the data come before the text, so that a receiver that cannot read the form receives the rest.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..values._describe import Cancelled
from ._errors import UnreachableError
from ._forms import Form, dense_form, written_form
from ._frame import Frame, places

SMALL: Final = 2**20
"""Bytes of the largest message that is sent in one transfer. A receiver keeps that much memory ready."""

_SPARE: Final = 16
"""The number of frames of one form that a sender keeps for later messages."""

POISON: Final = -1
"""The micro-batch number of a message that says: nothing more comes in this run."""

_MOST = 1024
"""The number of forms that are remembered. Sparse gradients have another form each time, so old ones are forgotten."""

_LAYOUT = struct.Struct("=5q")
_HEAD = _LAYOUT.size


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


class Sender:
    """The sending end. Only :meth:`forget` and :meth:`flush` wait.

    Args:
        peer: the receiving end.
        direct: sends the data of tensors; None if they go through host memory.
    """

    def __init__(self, peer: Peer, direct: Direct | None = None) -> None:
        self.peer = peer
        self._direct = direct
        self._forms: dict[Form, int] = {}
        self._spare: dict[Form, list[_Typed]] = {}
        self._under_way: dict[int, list[tuple[Any, Tensor | _Typed]]] = {}

    def put(self, microbatch: int, payload: Any, *, flag: bool = False) -> None:
        """Start to send the payload of a micro-batch."""
        form, tensors = dense_form(payload)
        if form in self._spare:
            self._send_again(microbatch, form, tensors, flag)
            return
        form, data = written_form(payload) if form is None else (form, form.data(tensors))
        text = b"" if form in self._forms else self._introduced(form)
        if self._direct is not None:
            self._direct.send(data)  # before the head, which says that they have been sent
            data = []
        self._send(microbatch, (microbatch, self._forms[form], len(text), flag), [_bytes(text), *data])

    def _introduced(self, form: Form) -> bytes:
        """The text of a form that the other end does not know yet; gives the form the next number."""
        if len(self._forms) >= _MOST:
            self._forms.clear()
            self._spare.clear()
        self._forms[form] = len(self._forms)
        if self._direct is None and _fits(form):
            self._spare[form] = []
        return f"{json.dumps(form.sizes)}\n{form.text}".encode()

    def _send_again(self, microbatch: int, form: Form, tensors: Sequence[Tensor | None], flag: bool) -> None:
        """Send a message whose form the other end knows, and which fits into one transfer."""
        spare = self._spare[form]
        typed = spare.pop() if spare else _Typed(form)
        _LAYOUT.pack_into(typed.frame.memory, 0, microbatch, self._forms[form], 0, flag, 1)
        for place, tensor in zip(typed.tensors, tensors, strict=True):
            if tensor is not None:
                place.copy_(tensor.detach())
        self._under_way.setdefault(microbatch, []).append((self.peer.send(typed.frame.data), typed))

    def poison(self, why: bytes) -> None:
        """Tell the other end that nothing more comes in this run, and why."""
        self._send(POISON, (POISON, 0, len(why), False), [_bytes(why)])

    def forget(self, microbatch: int) -> None:
        """Free the memory of the messages for a micro-batch, which have arrived, or will soon."""
        for work, memory in self._under_way.pop(microbatch, ()):
            self.peer.wait(work)
            if isinstance(memory, _Typed) and len(spare := self._spare.get(memory.form, [])) < _SPARE:
                spare.append(memory)

    def flush(self) -> None:
        """Wait until everything has been received."""
        for microbatch in [*self._under_way]:
            self.forget(microbatch)

    def _send(self, microbatch: int, head: tuple[int, int, int, bool], parts: Sequence[Tensor]) -> None:
        parts = [part.cpu() for part in parts if part.numel()]
        sizes = [part.numel() for part in parts]  # len() of a tensor is slower
        starts, total = places(sizes, _HEAD)
        small = total <= SMALL
        memory = bytearray(total if small else _HEAD)
        _LAYOUT.pack_into(memory, 0, *head, small)
        frame = torch.frombuffer(memory, dtype=torch.uint8)
        if small:
            for start, size, part in zip(starts, sizes, parts, strict=True):
                frame[start : start + size].copy_(part)
            parts = ()
        transfers = [(self.peer.send(part), part) for part in (frame, *parts)]
        self._under_way.setdefault(microbatch, []).extend(transfers)


class Receiver:
    """The receiving end.

    Args:
        peer: the sending end.
        device: the device of the tensors that are returned.
        direct: receives the data of tensors; None if they go through host memory.

    Attributes:
        poisoned: the reason why nothing more comes in this run; None as long as messages come.
    """

    def __init__(self, peer: Peer, device: torch.device, direct: Direct | None = None) -> None:
        self.peer = peer
        self.poisoned: bytes | None = None
        self._device = device
        self._direct = direct
        self._forms: list[_Known] = []
        self._expected = 0
        self._own: Any = Tensor.clone if device.type == "cpu" else partial(Tensor.to, device=device)
        self._frame = Frame(SMALL)
        self._posted: Any = _NOTHING_POSTED

    def expect(self, messages: int) -> None:
        """Prepare for a run in which that many messages come."""
        self._expected = messages
        self.poisoned = None
        if messages:
            self._post()

    def get(self) -> tuple[int, bool, Any]:
        """Wait for the next message: its micro-batch, flag, and payload.

        Raises:
            Cancelled: nothing more comes in this run; ``poisoned`` says why.
        """
        if self.poisoned is not None:
            raise Cancelled
        self._post()
        self.peer.wait(self._posted)
        self._posted = _NOTHING_POSTED
        microbatch, number, size, flag, small = _LAYOUT.unpack_from(self._frame.memory)
        known = self._forms[number] if small and not size and microbatch != POISON else None
        if known is not None and known.places is not None:
            payload = known.form().copied(known.places, self._own)
            self._took()
        else:
            payload = self._in_parts(microbatch, number, size, small)
        return microbatch, bool(flag), payload

    def _in_parts(self, microbatch: int, number: int, size: int, small: bool) -> Any:
        """The payload of a message that is read part by part, because its places in the frame are not known.

        Args:
            microbatch, number, size, small: its head.
        """
        parts = _Parts(self.peer, self._frame.data if small else None)
        text = parts.take([size])[0] if size else _NOTHING
        if microbatch == POISON:
            self.poisoned = bytes(text.tolist())
            raise Cancelled
        if size:
            if number == 0:  # the sender has forgotten all forms, and starts numbering again
                self._forms.clear()
            self._forms.append(_Known(bytes(text.tolist()).decode()))
        known = self._forms[number]
        data = parts.take(known.sizes) if self._direct is None else self._direct.receive(known.sizes)
        self._took()
        form = known.form()
        if self._direct is None and _fits(form):
            known.places = self._frame.tensors(form, _HEAD)  # for later messages; this one has been read
        return form.rebuild([part.to(self._device) for part in data])

    def drain(self) -> None:
        """After a failed run: receive everything up to the message that says that nothing more comes."""
        if self._direct is not None:
            self._direct.drain()
        with suppress(Cancelled):
            while True:
                self.get()

    def _took(self) -> None:
        """The frame is free: start to receive the next message into it, if there is one."""
        self._expected -= 1
        if self._expected > 0:
            self._post()

    def _post(self) -> None:
        """Start to receive the next message, so that it can arrive before :meth:`get` is called."""
        if self._posted is _NOTHING_POSTED:
            self._posted = self.peer.receive(self._frame.data)


class _Known:
    """A form that has arrived. It is parsed at its first use; one that cannot be parsed raises each time.

    Attributes:
        places: the offsets of its tensors in the frame of the receiver; None before it is parsed, and for messages
            that do not go through the frame.
    """

    def __init__(self, text: str) -> None:
        sizes, _, self._text = text.partition("\n")
        self.sizes: list[int] = json.loads(sizes)
        self._form: Form | None = None
        self.places: list[Tensor | None] | None = None

    def form(self) -> Form:
        if self._form is None:
            self._form = Form.parse(self._text)
        return self._form


class _Parts:
    """The parts of a message after its head: in its ``frame``, or separate transfers if there is none."""

    def __init__(self, peer: Peer, frame: Tensor | None) -> None:
        self._peer = peer
        self._frame = frame
        self._end = _HEAD

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """The next parts, of these sizes in bytes, each in memory of its own."""
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        present = [(size, part) for size, part in zip(sizes, parts, strict=True) if size]
        if self._frame is None:
            for work in [self._peer.receive(part) for _, part in present]:
                self._peer.wait(work)
        else:
            starts, self._end = places([size for size, _ in present], self._end)
            for start, (size, part) in zip(starts, present, strict=True):
                part.copy_(self._frame[start : start + size])
        return parts


class _Typed:
    """A frame for messages of a form that the other end knows.

    Attributes:
        frame: the memory of a whole message.
        tensors: the tensors of the form, in that memory.
    """

    __slots__ = ("form", "frame", "tensors")

    def __init__(self, form: Form) -> None:
        self.form = form
        self.frame = Frame(_size(form))
        self.tensors: list[Any] = self.frame.tensors(form, _HEAD)


def _size(form: Form) -> int:
    """Bytes of a message of this form in one transfer, without its text."""
    return places([size for size in form.sizes if size], _HEAD)[1]


def _fits(form: Form) -> bool:
    """Whether messages of this form are sent and received through frames that are used again."""
    return form.is_dense and _size(form) <= SMALL


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NOTHING


_NOTHING = torch.empty(0, dtype=torch.uint8)
_NOTHING_POSTED: Final = object()

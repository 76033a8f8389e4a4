"""Device-to-device transfers, with one communicator and one stream per channel direction.

The head and form of a message are sent through the host (:mod:`gpipe.distributed._messages`), after the transfers of
its tensors have been queued. The receiver allocates memory for the tensors, and its stage's stream waits for them::

    source computes   --y--x--------------------->          x: the link waits for y
    link                    \\--send--x                      x: y is recorded with it
    - - - - - - - - - - - - - -\\- - - - - - - - - - - -  another process
    link                  --recv--x                         x: event
    target computes  --------------\\--reads-->

The transfers of a communicator or stream run sequentially, and each waits for its other end. If directions shared one,
two ranks could deadlock: each would run a transfer whose other end is queued behind the other rank's transfer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from streams import (
    AbstractEvent,
    CPUStream,
    current_stream,
    new_stream,
    record_event,
    use_stream,
    wait_event,
    wait_stream,
    waiting,
)

from ..transport._copy import record_use, wait_for_payload
from ._agreement import agreement
from ._errors import UnreachableError
from ._forms import Dense, Form, view_as_bytes
from ._groups import Groups
from ._messages import Peer
from ._object_exchange import ObjectExchange

ChannelEnds = tuple[int, int, int]
"""The index of a channel, and its two stages."""

MOST: Final = 28
"""The maximum number of links per device. Torch takes new streams in turn from 32 per device and priority. A link needs
one for itself and one of high priority for its communicator, and copies need four. Work that shares a stream with a
transfer would wait for the transfer's other end, which may be waiting for this work."""

_MOMENT, _PAUSE = 2.0, 0.05  # seconds; messages of a process arrive at most _MOMENT after its exit


class DeviceLinks:
    """All links of a rank. They are aborted when the process at the other end of a transfer has exited.

    Otherwise the device would hang, with each thread that waits for it in a call that Python cannot interrupt. The exit
    of a process is detected by its closed gloo connection. A rank that ends its links also closes these connections, so
    that ranks whose devices wait for it abort their links. (A frozen process closes nothing: then torch's watchdog
    ends this process.)

    Args:
        groups: the ranks, with separate connections, over which nothing is sent.

    Attributes:
        found: the links, by the tag of their direction.
        last: the member at the other end of each link, and the link's last transfer.
    """

    def __init__(self, groups: Groups) -> None:
        self.found: dict[int, DeviceLink] = {}
        self.last: dict[DeviceLink, tuple[int, Any]] = {}
        self._ranks = groups
        self._groups: dict[int, list[dist.ProcessGroup]] = {}
        self._lost: UnreachableError | None = None

    def own(self, group: dist.ProcessGroup, member: int) -> None:
        if member not in self._groups:
            self._ranks.peers.add(member)
            waiting.Thread(target=self._attend, args=[member], name="gpipe attends a rank", daemon=True).start()
        self._groups.setdefault(member, []).append(group)

    def settle(self) -> None:
        """Wait until all tensors have been received, or the transfers were aborted."""
        for link in self.found.values():
            link.settle()

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        if self._groups:
            self._ranks.end()
        for member in [*self._groups]:
            self._abort(member)

    def _attend(self, member: int) -> None:
        self._ranks.wait_closed(member)
        end = time.monotonic() + _MOMENT
        while any(not work.is_completed() for other, work in [*self.last.values()] if other == member):
            if time.monotonic() > end:
                self._lost = self._lost or UnreachableError(member, ConnectionError("the connection has ended"))
                self._abort(member)
                return
            time.sleep(_PAUSE)

    def _abort(self, member: int) -> None:
        for group in self._groups.pop(member, ()):
            with suppress(RuntimeError):  # nothing else can be done if an abort fails
                group.abort()


class DeviceLink:
    """One end of a channel direction. ``peer`` is the other end, in a process group of these two ranks."""

    def __init__(self, peer: Peer, device: torch.device, device_links: DeviceLinks) -> None:
        self._peer = peer
        self._device = device
        self._device_links = device_links
        self._stream = new_stream(device)
        self._owed: Form | None = None
        self._last: AbstractEvent = None

    def send(self, data: Sequence[Tensor]) -> None:
        """Queue transfers of ``data`` after the work on the current stream. No thread waits."""
        wait_stream(self._stream, current_stream(self._device))
        with use_stream(self._stream):
            parts = view_as_bytes([part.to(self._device) for part in data])
            self._transfer([self._peer.send(part) for part in parts])
        for part in parts:
            record_use(part, self._stream)

    def receive(self, form: Form) -> list[Tensor | None]:
        """Return the tensors of a message of this ``form``. The current stream waits for them, but no thread."""
        self._owed = form  # until their memory is allocated
        with use_stream(self._stream):
            tensors = form.empty(self._device)
            self._owed = None
            self._transfer([self._peer.receive(part) for part in view_as_bytes(tensors)])
        self._last = record_event(self._stream)
        wait_for_payload([*tensors], self._last, current_stream(self._device))
        return tensors

    def open(self, *, leads_away: bool) -> None:
        """Create the communicator with a first transfer. Both ends call this together."""
        if leads_away:
            self.send([torch.zeros(1, dtype=torch.uint8, device=self._device)])
        else:
            self.receive(Form(None, (Dense(torch.uint8, torch.Size([1]), (1,), requires_grad=False),)))
        wait_stream(CPUStream, self._stream)
        self._device_links.check()

    def drain(self) -> None:
        if self._owed is not None:
            self.receive(self._owed)

    def settle(self) -> None:
        wait_event(CPUStream, self._last)
        self._device_links.last.pop(self, None)  # it may refer to tensors

    def _transfer(self, works: list[Any]) -> None:
        for work in works:
            self._device_links.last[self] = self._peer.member, work
            self._peer.wait(work)  # makes the current stream wait, not the thread


def open_device_links(
    meeting: ObjectExchange,
    ranks: Sequence[int],
    channels: Iterable[ChannelEnds],
    devices: Mapping[int, torch.device],
    backends: Sequence[str | None],
) -> DeviceLinks:
    """Open the device_links of this rank. All ranks call this together.

    Args:
        meeting: used to agree on whether all device_links are open.
        ranks: the rank of each stage.
        channels: the channels of the pipe, in the same order on all ranks.
        devices: the device of each of this rank's stages.
        backends: the backend that sends from the device of each stage; None for host memory.

    Raises:
        ValueError: a device would need too many streams.
        RuntimeError: a communicator cannot be created.
        RemoteError: another rank has raised one of these errors.
    """
    groups, directions = meeting.groups, direct(channels, backends)
    if not directions:
        return DeviceLinks(groups)
    device_links = DeviceLinks(groups.connect_again("present"))
    with agreement(meeting):
        _expect_few(directions, devices)
        # All ranks open links in the same order, so the two ends of the first link that is not open yet always meet.
        for tag, source, target in directions:
            leads_away = source in devices
            here, there = (source, target) if leads_away else (target, source)
            if here in devices:
                mine, other = groups.members[groups.me], groups.members[ranks[there]]
                try:
                    group = _communicator_of_two(str(backends[here]), f"link {tag}", groups, ranks[there])
                    device_links.own(group, ranks[there])
                    peer = Peer(group, ranks[there], 0, 0, number=int(mine < other))
                    device_links.found[tag] = DeviceLink(peer, devices[here], device_links)
                    device_links.found[tag].open(leads_away=leads_away)
                except (RuntimeError, UnreachableError) as error:
                    raise RuntimeError(
                        f"rank {mine} cannot reach rank {other} over {backends[here]}, between stages {source} and "
                        f"{target}: {error}; use transport='host' to send through host memory instead"
                    ) from error
    return device_links


def tags(number: int) -> tuple[int, int]:
    return 2 * number, 2 * number + 1


def direct(channels: Iterable[ChannelEnds], backends: Sequence[str | None]) -> list[ChannelEnds]:
    """Return the channel directions that use device-to-device transfers, as tag, source and target stage.

    The order is the same on all ranks.
    """
    found = []
    for number, a, b in channels:
        if backends[a] is not None and backends[a] == backends[b]:
            forth, back = tags(number)
            found += [(forth, a, b), (back, b, a)]
    return found


def _expect_few(directions: Iterable[ChannelEnds], devices: Mapping[int, torch.device]) -> None:
    """Raise ValueError if one of ``devices``, by stage, would have more than :data:`MOST` device_links."""
    counts = Counter(devices[stage] for _, *ends in directions for stage in ends if stage in devices)
    for device, count in counts.items():
        if count > MOST:
            raise ValueError(
                f"{device} would need {count} streams for transfers to and from other ranks, but has {MOST}, and "
                "transfers that share a stream can deadlock; give this rank fewer stages or skips, or use "
                "transport='host' to send through host memory"
            )


def _communicator_of_two(backend: str, name: str, groups: Groups, member: int) -> Any:
    """Create a process group of this rank and ``member``, as torch would for this ``backend``.

    The process with the lower global rank is rank 0. ``torch.distributed.new_group`` is unsuitable, see
    :func:`open_groups`. In addition, if a device is bound to the group of all processes, it splits that group, which is
    a collective of all processes.
    """
    c10d: Any = dist.distributed_c10d  # its stubs do not export these names
    mine = groups.members[groups.me]
    pair = sorted([mine, groups.members[member]])
    store = c10d.PrefixStore(name, groups.store)
    # Torch's watchdog ends the process when a transfer exceeds its group's timeout. The pipe's timeout is shorter.
    longer = 2 * groups.timeout + timedelta(minutes=1)
    if backend not in ("nccl", "xccl"):
        return dist.Backend._plugins[backend.upper()].creator_fn(store, pair.index(mine), 2, longer)
    kind = getattr(c10d, f"ProcessGroup{backend.upper()}")
    # Streams for computation and copies are taken from a different pool than high-priority streams, see MOST.
    options = kind.Options(is_high_priority_stream=True)
    options._timeout, options.global_ranks_in_group, options.group_name = longer, pair, f"gpipe {name}"
    return kind(store, pair.index(mine), 2, options)

"""Channels between a stage of this rank and one of another: a sender in one direction, a receiver in the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ._groups import Groups
from ._messages import Peer, Receiver, Sender, Taken
from ._places import Channel, tags
from ._wires import Wires


class Crossing(NamedTuple):
    """One such channel.

    Attributes:
        number: the number of the channel.
        member: the other rank.
        leads_away: whether this rank sends values and receives gradients; else the other way round.
        sender, receiver: the two directions.
        most: how many values may be under way in a run without backwards.
    """

    number: int
    member: int
    leads_away: bool
    sender: Sender
    receiver: Receiver
    most: int


def crossings_of(
    groups: Groups,
    ranks: Sequence[int],
    channels: Iterable[Channel],
    devices: Mapping[int, torch.device],
    wires: Wires,
) -> Iterator[Crossing]:
    """Those of ``channels`` that end at this rank, which is at one of their ends only.

    Args:
        groups: the ranks, and the connections between them.
        ranks: the rank of each stage.
        channels: the channels between all ranks.
        devices: the device of each stage of this rank.
        wires: for directions in which tensors go from device to device; others go through host memory.
    """
    for number, a, b in channels:
        if groups.me in (ranks[a], ranks[b]):
            leads_away = ranks[a] == groups.me
            here, there = (a, b) if leads_away else (b, a)
            values, gradients = tags(number)
            out, into = (values, gradients) if leads_away else (gradients, values)
            taken = Taken()
            sender = Sender(Peer(groups.values, ranks[there], out), wires.get(out), taken)
            peer = Peer(groups.values, ranks[there], into)
            receiver = Receiver(peer, devices[here], wires.get(into), sender, taken)
            # As many as 1F1B holds. Without backwards stage j computes micro-batch t - j in tick t: a sender that waits
            # for what is taken in earlier ticks waits for no rank that waits for it.
            most = max(b - a + 1, len(ranks) - a)
            yield Crossing(number, ranks[there], leads_away, sender, receiver, most)

"""The stages of a rank, and what connects them to each other and to those of other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from ..engine._stage import Stage
from ..module._choices import Choices, laid_out
from ..skip import SkipLayout
from ..transport._copy import CopyStreams
from ._groups import Groups
from ._own import Share
from ._places import place_of, places_of
from ._rendezvous import Rendezvous
from ._wires import Wires, open_wires

_CPU = torch.device("cpu")


class Connected(NamedTuple):
    """The stages of a rank, and their connections.

    Attributes:
        stages: the stages of this rank.
        layout: the skips between all stages.
        copy_streams: the streams that copy to and from each stage of this rank.
        ties: for each pair of ranks that share tensors, a stage of each that has such a tensor.
        wires: the connections between accelerators of this rank and of others.
    """

    stages: list[Stage]
    layout: SkipLayout
    copy_streams: list[CopyStreams]
    ties: list[tuple[int, int]]
    wires: Wires


def told_of(share: Share, transport: str) -> dict[str, Any]:
    """What a rank tells the others of its share before they connect.

    Returns:
        The numbers of its ``trained`` stages, those with parameters to train; the ``places`` of all its stages; and a
        ``name`` for all wires.
    """
    own = zip(share.numbers, share.partitions, strict=True)
    trained = [j for j, partition in own if any(p.requires_grad for p in partition.parameters())]
    places = [place_of(device, transport) for device in share.devices]
    return {"trained": trained, "places": places, "name": uuid4().hex}


def connected(
    share: Share,
    choices: Choices,
    ranks: Sequence[int],
    groups: Groups,
    rendezvous: Rendezvous,
    told: Sequence[Mapping[str, Any]],
) -> Connected:
    """Lay the stages out, and open the wires. All ranks call this together.

    Args:
        share: the part of the model that this rank has.
        choices: what is checkpointed; that decides which stages have blocks.
        ranks: the rank of each stage.
        told: by rank, what :func:`told_of` returned there. The ``name`` of rank 0 counts.

    Raises:
        RuntimeError: a wire could not be opened; see :func:`open_wires`.
    """
    here = dict(zip(share.numbers, share.devices, strict=True))
    devices = [here.get(j, _CPU) for j in range(len(ranks))]
    every, layout = laid_out(share.every, devices, choices)
    stages = [stage for stage in every if stage.index in here]
    streams = [CopyStreams.on(device) for device in here.values()]
    places = places_of(ranks, [each["places"] for each in told])
    wires = open_wires(rendezvous, groups, ranks, layout, share.ties, devices, places, told[0]["name"])
    return Connected(stages, layout, streams, share.ties, wires)

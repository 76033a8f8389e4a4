"""The stages of a rank, and what connects them to each other and to those of other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from ..engine._stage import Stage
from ..module._pieces import Choices, laid_out, pieces_of
from ..skip import SkipLayout
from ..transport._copy import CopyStreams
from ._groups import Groups
from ._own import Share
from ._places import place_of, places_of
from ._rendezvous import Rendezvous
from ._wires import Wires, open_wires

_CPU = torch.device("cpu")


class Connected(NamedTuple):
    """The stages of a rank, and their connections. Where a partition is in pieces, each piece is a stage here.

    Attributes:
        stages: the stages of this rank.
        layout: the skips between all stages.
        copy_streams: the streams that copy to and from each stage of this rank.
        ranks: the rank of each stage of the pipe.
        ties: for each pair of ranks that share tensors, a stage of each that has such a tensor.
        wires: the connections between accelerators of this rank and of others.
    """

    stages: list[Stage]
    layout: SkipLayout
    copy_streams: list[CopyStreams]
    ranks: list[int]
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
        choices: what is checkpointed; that decides which partitions are in pieces.
        ranks: the rank of each partition.
        told: by rank, what :func:`told_of` returned there. The ``name`` of rank 0 counts.

    Raises:
        RuntimeError: a wire could not be opened; see :func:`open_wires`.
    """
    here = dict(zip(share.numbers, share.devices, strict=True))
    every, layout = laid_out(pieces_of(share.every, choices), [here.get(j, _CPU) for j in range(len(ranks))])
    of_stages = [ranks[stage.partition] for stage in every]
    stages = [stage for stage in every if stage.partition in here]
    streams = {j: CopyStreams.on(device) for j, device in here.items()}
    first = {stage.partition: stage.index for stage in reversed(every)}
    ties = [(first[a], first[b]) for a, b in share.ties]
    of_partitions = places_of(ranks, [each["places"] for each in told])
    places = [of_partitions[stage.partition] for stage in every]
    devices = [stage.device for stage in every]
    wires = open_wires(rendezvous, groups, of_stages, layout, ties, devices, places, told[0]["name"])
    return Connected(stages, layout, [streams[stage.partition] for stage in stages], of_stages, ties, wires)

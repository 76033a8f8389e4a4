"""The stages of a rank among those of all ranks, and what connects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..engine._stage import Stage
from ..module._pieces import Choices, laid_out, pieces_of
from ..skip import SkipLayout
from ..transport._copy import CopyStreams
from ._groups import Groups
from ._own import Share
from ._places import places_of
from ._rendezvous import Rendezvous
from ._wires import Wires, open_wires

_CPU = torch.device("cpu")


class Connected(NamedTuple):
    """Of a partition in pieces each piece is a stage here.

    Attributes:
        stages: of this rank.
        layout: of skips between all stages.
        copy_streams: of those of this rank.
        ranks: that of each stage of all.
        ties: for each pair of ranks that have tensors in common, a stage of each that has them.
        wires: between accelerators of this rank and others.
    """

    stages: list[Stage]
    layout: SkipLayout
    copy_streams: list[CopyStreams]
    ranks: list[int]
    ties: list[tuple[int, int]]
    wires: Wires


def connected(
    share: Share,
    choices: Choices,
    ranks: Sequence[int],
    groups: Groups,
    rendezvous: Rendezvous,
    told: Sequence[Mapping[str, Any]],
) -> Connected:
    """Lay the stages out, and open the wires; all ranks call this.

    Args:
        share: of this rank.
        choices: what is checkpointed, which says which partitions are in pieces.
        ranks: that of each partition.
        told: by rank, the ``places`` of its partitions, and a ``name`` for all wires, of which the first counts.

    Raises:
        RuntimeError: a wire could not be opened; see :func:`open_wires`.
    """
    own = [j for j, rank in enumerate(ranks) if rank == groups.me]
    here = dict(zip(own, share.devices, strict=True))
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

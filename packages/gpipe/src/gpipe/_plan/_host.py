"""Plan what is on the host: saved tensors with ``checkpoint="offload"``, and parameters with ``offload=True``.

With parameters on the host, a device holds two stages at a time, the one that computes and the next one, so more stages
need less memory. Each transfer serves all micro-batches, so the transfers of a step take as long with any number of
stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from profiler.text import format_bytes

from ..module._arguments import check_flag
from ..schedule import looped_placement
from ..schedule._loads import ROOM
from ..schedule._named import BREADTH_FIRST
from ._arguments import read_bytes
from ._bytes import DeviceBytes
from ._links import LINK

if TYPE_CHECKING:
    from ._candidate import Candidate
    from ._costs import Measured

STAGES = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of stages per device to search. With two, nothing would be unloaded."""

NOTE = "bytes: summed over the layers, with the two largest neighboring stages on each device"


@dataclass(frozen=True)
class Host:
    """The host.

    Attributes:
        memory: the limit of a plan's bytes there; None for no limit.
        bandwidth: bytes per second between the host and each device, in each direction.
        parameters: whether it has the parameters, their gradients and the optimizer's state.
    """

    memory: int | None = None
    bandwidth: float = LINK.bandwidth
    parameters: bool = False


def read_host(offload: object, memory: int | str | None, bandwidth: float | str | None) -> Host:
    return Host(
        None if memory is None else read_bytes(memory, "host_memory"),
        LINK.bandwidth if bandwidth is None else read_bytes(bandwidth, "host_bandwidth"),
        check_flag("offload", offload),
    )


def list_looped_placements(devices: int, layers: int) -> dict[tuple[int, ...], list[str]]:
    """Return the placements of stages to search, with their schedule.

    >>> [len(placement) for placement in list_looped_placements(devices=2, layers=9)]
    [6, 8]
    """
    counts = [each * devices for each in STAGES if each * devices <= layers]
    return {tuple(looped_placement(count, devices)): [BREADTH_FIRST] for count in counts}


def share_of_device(stage: DeviceBytes, stages: int) -> DeviceBytes:
    """Return an equal part of the bytes of a device that has ``stages`` stages like this one.

    Args:
        stage: the bytes of the stage as if it were always on its device.
        stages: the number of stages of the device.
    """
    return DeviceBytes(
        parameters=ROOM * stage.parameters // stages,
        gradients=ROOM * stage.gradients // stages,
        optimizer=0,
        activations=stage.activations,
        transient=stage.transient // stages,
    )


def device_bytes(
    placement: Sequence[int], stages: Sequence[DeviceBytes], buffers: Sequence[int]
) -> tuple[DeviceBytes, ...]:
    """Return the bytes of each device, with its two largest neighboring stages.

    Args:
        placement: the device of each stage.
        stages: the bytes of each stage as if it were always on its device.
        buffers: the bytes of each stage that always are.
    """
    found = []
    for place in sorted({*placement}):
        own = [j for j, each in enumerate(placement) if each == place]
        pairs: list[tuple[int, ...]] = [*pairwise(own)] or [(own[0],)]
        of_parameters = [sum(stages[j].parameters - buffers[j] for j in pair) for pair in pairs]
        found.append(
            DeviceBytes(
                parameters=max(of_parameters) + sum(buffers[j] for j in own),
                gradients=max(sum(stages[j].gradients for j in pair) for pair in pairs),
                optimizer=0,
                activations=sum(stages[j].activations for j in own),
                transient=max(stages[j].transient for j in own),
            )
        )
    return tuple(found)


def parameter_bytes(measured: Measured) -> int:
    """Return the bytes of parameters, gradients and the optimizer's state, if they are on the host."""
    if not measured.host.parameters:
        return 0
    return sum(each.parameter_bytes + each.trainable_bytes for each in measured.profile) + sum(measured.optimizer)


def host_notes(candidate: Candidate) -> list[str]:
    """Return the notes of a plan about what is on the host."""
    measured, notes = candidate.costs.measured, list[str]()
    host, of_parameters = measured.host, parameter_bytes(measured)
    of = "" if host.memory is None else f" of {format_bytes(host.memory)}"
    link = f"links to the host are assumed to send {host.bandwidth / 1e9:.4g} GB/s in each direction"
    if host.parameters:
        notes.append(
            f"parameters, gradients and the optimizer's state are on the host: {format_bytes(of_parameters)}{of}; "
            f"{link}, and the time of the optimizer is not included"
        )
    if saved := candidate.host_bytes - of_parameters:
        assumed = "" if host.parameters else f"; {link}"
        notes.append(f"up to {format_bytes(saved)} of saved tensors are on the host at a time{assumed}")
    return notes

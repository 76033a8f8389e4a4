"""Search the schedule for the costs of stages that :func:`gpipe.simulate.simulate` predicts to be fastest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..schedule import Kind, Schedule, checkpoint_stops
from ..schedule import search as searched
from ..schedule._modes import offloading_stages
from ..schedule._problem import Limits
from ._costs import StageCost
from ._hops import Transfer, hop_seconds
from ._simulate import crossing_bytes, expect_one_each


def search(
    costs: Sequence[StageCost],
    *,
    microbatches: int,
    checkpoint: str | Sequence[str] = "never",
    placement: Sequence[int] | None = None,
    transfer: Transfer = 0.0,
    memory: Limits = None,
    split: Collection[int] | None = None,
) -> Schedule:
    """Search a fast schedule for stages with ``costs`` whose activations fit into memory.

    By :func:`simulate` it is at least as fast as every named schedule that suits the placement and fits.

    Args:
        costs, placement, transfer: as for :func:`simulate`. By default every stage has its own worker.
        microbatches: the number of micro-batches.
        checkpoint: a mode, or one per stage, but not ``"offload"``. The schedule contains the recomputations.
        memory: the most bytes of activations that a worker may hold, as one number or one per worker; None is no limit.
            The activations of a stage are the ``activation_bytes`` of its cost, and the ``boundary_bytes`` of a
            checkpointed micro-batch before its recomputation.
        split: the stages whose backward is split, by default all.

    Returns:
        The schedule, which :meth:`gpipe.GPipe.step` runs.

    Raises:
        TypeError: ``transfer`` is neither a number nor a function that returns one.
        ValueError: an argument is invalid or has the wrong length, or a single micro-batch does not fit into memory.

    >>> from gpipe.simulate import simulate
    >>> costs = [StageCost(forward=1, backward=2, activation_bytes=10)] * 2
    >>> schedule = search(costs, microbatches=4, memory=20)
    >>> print(schedule)
    F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
    F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
    >>> simulate(schedule, costs).makespan
    13.0
    """
    place = list(range(len(costs))) if placement is None else list(placement)
    expect_one_each(len(costs), placement=place)
    if offloading_stages(checkpoint, len(costs)):
        raise ValueError(
            'checkpoint: expected modes other than "offload", because a search does not plan transfers to the host, '
            f"got {checkpoint!r}; search without it, and add the transfers by Schedule.offloading()"
        )
    return searched(
        microbatches,
        place,
        [{kind: cost.seconds(kind) for kind in Kind} for cost in costs],
        hops=hop_seconds(transfer, crossing_bytes(costs, place)),
        activation_bytes=[cost.activation_bytes for cost in costs],
        boundary_bytes=[cost.boundary_bytes for cost in costs],
        memory=memory,
        checkpoint_stop=checkpoint_stops(checkpoint, microbatches, len(costs)),
        split=split,
    )

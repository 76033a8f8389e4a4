"""The arguments for running a plan in processes, one for each rank of each replica. Nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..module._arguments import whole
from ._data import PlanData


@dataclass(frozen=True)
class RankPlace:
    """The part of one process.

    Attributes:
        replica: the number of its replica.
        rank: the rank of the process within the replica.
        stages: the numbers of the stages that it has.
        rows: the rows of the mini-batch for the replica, a slice: ``x[place.rows]``.
        pipe: the ranks, in the world, of the processes of its replica: the ``group`` of
            :class:`gpipe.distributed.Rank`.
        twins: the ranks, in the world, of the processes with the same stages, one of each replica: the group over which
            gradients are averaged.
    """

    replica: int
    rank: int
    stages: tuple[int, ...]
    rows: slice
    pipe: tuple[int, ...]
    twins: tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """How to run a plan in one process for each rank of each replica. Made by :meth:`Plan.distribute`.

    Attributes:
        mesh_shape: replicas, and the ranks of each. Rank ``r`` of the world is rank ``r % ranks`` of replica
            ``r // ranks``, as in ``init_device_mesh("cuda", found.mesh_shape)``.
        rank_arguments: the arguments of :class:`gpipe.distributed.Rank`, besides the model and the group.
        step_arguments: the arguments of ``step``, besides the mini-batch.
        rows: the rows of the mini-batch for each replica.
    """

    mesh_shape: tuple[int, int]
    rank_arguments: dict[str, Any]
    step_arguments: dict[str, Any]
    rows: int

    @property
    def world_size(self) -> int:
        """The number of processes."""
        replicas, ranks = self.mesh_shape
        return replicas * ranks

    def place(self, rank: int) -> RankPlace:
        """The part of the process of a rank.

        Args:
            rank: the rank in the world, such as ``torch.distributed.get_rank()``.

        Returns:
            Its replica, its rank and stages there, its rows, and its groups.

        Raises:
            TypeError: ``rank`` is not an integer.
            ValueError: the world has no such rank.
        """
        if not 0 <= whole(rank) < self.world_size:
            raise ValueError(
                f"rank: the plan is for {self.world_size} processes, ranks 0 to {self.world_size - 1}; got {rank}"
            )
        _, ranks = self.mesh_shape
        replica, own = divmod(rank, ranks)
        return RankPlace(
            replica,
            own,
            tuple(j for j, each in enumerate(self.rank_arguments["ranks"]) if each == own),
            slice(replica * self.rows, (replica + 1) * self.rows),
            tuple(range(replica * ranks, (replica + 1) * ranks)),
            tuple(range(own, self.world_size, ranks)),
        )


def distribute(plan: PlanData) -> Distribution:
    """The arguments for one process for each rank of each replica; see :meth:`gpipe.Plan.distribute`."""
    ranks = max(plan.ranks) + 1
    arguments = {
        "balance": plan.balance,
        "chunks": plan.chunks,
        "checkpoint": plan.checkpoint,
        "ranks": list(plan.ranks),
    }
    return Distribution((plan.replicas, ranks), arguments, {"schedule": plan.schedule}, plan.rows // plan.replicas)

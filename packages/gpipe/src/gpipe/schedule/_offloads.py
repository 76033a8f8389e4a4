"""Insert the actions that move the saved tensors of cells to the host, and back before their backwards.

While a worker computes one cell, the saved tensors of the previous one leave, or those of the next one arrive::

    F0 O0 F1 O1 F2 O2 F3 P2 B3 P1 B2 P0 B1 B0

The last cell stays, because its backward comes next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from ._actions import TRANSFERS, TRIPS, Action, Kind, Step, WorkerSteps

CELLS = 2
"""The number of cells whose saved tensors a worker has on its device: the one that computes, and the next one.

One more may be leaving, if forwards and backwards alternate.
"""

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def with_offloads(worker_steps: WorkerSteps, offloading: Collection[int], room: int = CELLS) -> WorkerSteps:
    """Insert offloads and prefetches of cells of the ``offloading`` stages, unless ``worker_steps`` already has some.

    The saved tensors of a cell leave right after its forward. They return before the step that is ``room - 1`` steps
    ahead of its backward. A cell stays if no step would be between the two. A cell without a backward in
    ``worker_steps`` leaves, and one without a forward returns.
    """
    if any(step.action.kind in TRIPS for step in chain.from_iterable(worker_steps)):
        return worker_steps
    return tuple(tuple(_add_offloads(line, offloading, room - 1)) for line in worker_steps)


def _add_offloads(line: Sequence[Step], offloading: Collection[int], ahead: int) -> Iterator[Step]:
    computing = [step for step in line if step.action.kind not in TRANSFERS]
    own = [(k, step) for k, step in enumerate(computing) if step.stage in offloading]
    began = {_cell(step): k for k, step in own if step.action.kind == Kind.FORWARD}
    ends = {_cell(step): k for k, step in own if step.action.kind in _BACKWARDS}
    staying = {cell for cell, k in ends.items() if cell in began and k - began[cell] <= ahead + 1}
    # In the order of the backwards.
    returning: dict[int, list[Step]] = {}
    for (stage, i), k in ends.items():
        if (stage, i) not in staying:
            returning.setdefault(max(0, k - ahead), []).append(Step(stage, Action(Kind.PREFETCH, i)))
    yield from returning.pop(0, [])
    at = 0
    for step in line:
        yield step
        if step.action.kind in TRANSFERS:
            continue
        at += 1
        # Before the offload: each of them waits for the offloads before it.
        yield from returning.get(at, [])
        if step.action.kind == Kind.FORWARD and step.stage in offloading and _cell(step) not in staying:
            yield Step(step.stage, Action(Kind.OFFLOAD, step.action.microbatch))


def expect_prefetched(worker_steps: WorkerSteps, offloading: Collection[int]) -> None:
    """Raise ValueError unless the saved tensors of each cell are on its device whenever it has a backward.

    Cells of stages that are not in ``offloading`` must not leave it.
    """
    for line in worker_steps:
        computed, away = set[tuple[int, int]](), set[tuple[int, int]]()
        for step in line:
            kind, cell = step.action.kind, _cell(step)
            if kind in TRIPS and step.stage not in offloading:
                raise ValueError(f"the schedule has {step}, but stage {step.stage} does not have checkpoint='offload'")
            if kind == Kind.OFFLOAD and (cell in away or cell not in computed):
                raise ValueError(f"the schedule has {step}, but micro-batch {cell[1]} has no saved tensors there")
            if kind == Kind.PREFETCH and cell not in away:
                raise ValueError(f"the schedule has {step}, but micro-batch {cell[1]} was not offloaded before it (O)")
            if kind in (*_BACKWARDS, Kind.BACKWARD_WEIGHT) and cell in away:
                raise ValueError(f"{step} needs the saved tensors of its cell, which were not prefetched before it (P)")
            if kind == Kind.FORWARD:
                computed.add(cell)
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                computed.discard(cell)
            elif kind == Kind.OFFLOAD:
                away.add(cell)
            elif kind == Kind.PREFETCH:
                away.discard(cell)


def cells_offloaded(worker_steps: WorkerSteps) -> frozenset[tuple[int, int]]:
    """Return the stage and micro-batch of each cell that is offloaded."""
    return frozenset(_cell(step) for line in worker_steps for step in line if step.action.kind == Kind.OFFLOAD)


def _cell(step: Step) -> tuple[int, int]:
    return step.stage, step.action.microbatch

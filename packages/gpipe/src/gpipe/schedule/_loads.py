"""Insert the loads and unloads of stages whose parameters are on the host.

A worker holds the parameters of a few stages at a time. While it computes one stage, the next one is loaded, so a
breadth-first order loads each stage once for its forwards and once for its backwards::

    L0@0 L0@1 F0@0 F1@0 U0@0 L0@2 F0@1 F1@1 U0@1 L0@3 F0@2 ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from ._actions import MOVES, TRANSFERS, TRIPS, Action, Kind, Step, WorkerSteps

ROOM = 2
"""The number of stages whose parameters a worker holds at once: the one that computes, and the next one."""


def with_loads(worker_steps: WorkerSteps, offloaded: Collection[int], room: int = ROOM) -> WorkerSteps:
    """Insert loads and unloads of the ``offloaded`` stages, unless ``worker_steps`` already has some.

    A worker loads the stages that it needs next, at most ``room`` at once. If it has to unload one, it is the stage
    that it needs last (Belady's rule), and a stage that it needs no more is unloaded at once.
    """
    if any(step.action.kind in MOVES for step in chain.from_iterable(worker_steps)):
        return worker_steps
    return tuple(tuple(_add_loads(line, offloaded, room)) for line in worker_steps)


def _add_loads(line: Sequence[Step], offloaded: Collection[int], room: int) -> Iterator[Step]:
    visits = _visits(line)
    visited = [stage for stage, _ in visits]
    loads = Counter[int]()
    resident: list[int] = []

    def unload(stage: int) -> Step:
        resident.remove(stage)
        return Step(stage, Action(Kind.UNLOAD, loads[stage] - 1))

    for at, (_, steps) in enumerate(visits):
        upcoming = [stage for stage in dict.fromkeys(visited[at:]) if stage in offloaded]
        yield from [unload(stage) for stage in [*resident] if stage not in upcoming]
        missing = [stage for stage in upcoming[:room] if stage not in resident]
        others = [stage for stage in reversed(upcoming[room:]) if stage in resident]
        yield from [unload(stage) for stage in others[: max(0, len(resident) + len(missing) - room)]]
        for stage in missing:
            yield Step(stage, Action(Kind.LOAD, loads[stage]))
            loads[stage] += 1
            resident.append(stage)
        yield from steps
    yield from [unload(stage) for stage in [*resident]]


def _visits(line: Sequence[Step]) -> list[tuple[int, list[Step]]]:
    """Return the steps of a worker, grouped by the stage that computes.

    Transfers of saved tensors need no parameters, and belong to the group of the step before them.
    """
    visits: list[tuple[int, list[Step]]] = []
    for step in line:
        if not visits or (step.stage != visits[-1][0] and step.action.kind not in TRIPS):
            visits.append((step.stage, []))
        visits[-1][1].append(step)
    return visits


def expect_loaded(worker_steps: WorkerSteps, offloaded: Collection[int]) -> None:
    """Raise ValueError unless each stage of ``offloaded``, and no other, is loaded whenever it computes."""
    for step, resident in _residents(worker_steps):
        stage, (kind, _) = step
        if kind in MOVES and stage not in offloaded:
            raise ValueError(f"the schedule has {step}, but the parameters of stage {stage} are not offloaded")
        if kind in MOVES and (stage in resident) == (kind == Kind.LOAD):
            raise ValueError(
                f"the schedule has {step} while stage {stage} is {'' if stage in resident else 'not '}loaded"
            )
        if kind not in (*TRANSFERS, Kind.LOSS) and stage in offloaded and stage not in resident:
            raise ValueError(f"{step} needs the parameters of stage {stage}, which are not loaded before it (L)")


def _residents(worker_steps: Sequence[Sequence[Step]]) -> Iterator[tuple[Step, set[int]]]:
    """Yield each step with the stages that its worker has loaded before it."""
    for line in worker_steps:
        resident = set[int]()
        for step in line:
            yield step, resident
            if step.action.kind == Kind.LOAD:
                resident.add(step.stage)
            elif step.action.kind == Kind.UNLOAD:
                resident.discard(step.stage)

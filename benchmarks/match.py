"""A match: all contenders do one task in turns, each in its own process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import track

from .contenders import Contender, Task
from .measure import Step, repeats_within
from .process import Failure, Process

TOLERANCE = 1e-3  # relative to the largest gradient element: float32, summed in a different order


@dataclass
class Outcome:
    """One contender's results: seconds and page faults per step in each round, or the reason for a failure.

    Attributes:
        faults: mean number of page faults per step, of all its processes.
        threads: intra-op threads of its (first) process.
        grown: growth of resident memory since before its first step, in bytes, of all its processes.
        difference: from the first contender's results, relative to the largest element.
    """

    seconds: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    threads: int | None = None
    grown: int | None = None
    difference: float | None = None
    failure: str | None = None


Outcomes = dict[Contender, Outcome]


@dataclass(frozen=True)
class Rules:
    """Settings of a match.

    Attributes:
        turn: seconds that the first contender takes for the steps of a turn.
        limit: seconds to wait for one answer of a process.
        pin: whether gpipe's workers, the two loops and the ranks of torch.distributed are each pinned to a core.
    """

    rounds: int = 10
    turn: float = 0.1
    limit: float = 300.0
    pin: bool = True


class Match:
    """Keep the contenders' processes alive from one task to the next, and replace any that failed.

    Each contender needs its own process: fairscale's workers keep an interpreter from ending, torchgpipe starts
    threads in every run, and numbers of threads and the allocator's settings count for a whole process.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._processes: dict[Contender, Process] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Match:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    def __exit__(self, *_: object) -> None:
        for end in (Process.request_end, Process.end):  # request all first, so that they exit concurrently
            for process in self._processes.values():
                end(process)
        self._stack.close()

    def play(self, task: Task, contenders: list[Contender], comparable: Callable[[Contender], bool]) -> Outcomes:
        """Let `contenders` do `task` in turns.

        Args:
            contenders: the first is the reference of results, and sets the length of a turn.
            comparable: returns whether a contender's results must match the reference.
        """
        processes = [self._process(contender) for contender in contenders]
        reference = processes[0]
        outcomes = {contender: Outcome() for contender in contenders}
        _together(processes, "prepare", task)
        # The results are compared after one step: its gradients are from before the optimizer's first change.
        _together(processes, "run", 1)
        if reference.failure is None:
            self._check([process for process in processes if comparable(process.contender)], reference, outcomes)
            self._rounds(task, processes, reference, outcomes)
            _each(processes, lambda process: _note_process(process, outcomes[process.contender]))
        for process in processes:
            failure = process.failure or (reference.failure and f"not run, because {reference.contender.name} failed")
            if failure:
                outcomes[process.contender] = Outcome(failure=failure)
        return outcomes

    def ask(self, contender: Contender, name: str) -> list[Any]:
        """Return the answers of a contender's processes to a command of `process.Server`."""
        return self._processes[contender].ask(name)

    def _check(self, processes: list[Process], reference: Process, outcomes: Outcomes) -> None:
        file = self._folder / "results.pt"
        [names] = reference.ask("save", file)
        _each(processes, lambda process: _compare(process, outcomes[process.contender], file, names))

    def _rounds(self, task: Task, processes: list[Process], reference: Process, outcomes: Outcomes) -> None:
        steps = repeats_within(self.rules.turn, _turn(reference, 2)[0], most=50)
        for k in track(range(self.rules.rounds), f"{task.workload}, m={task.chunks}", transient=True):
            turns = processes[:: -1 if k % 2 else 1]  # alternate the order, so that the predecessor varies
            _each(turns, lambda process: _note_turn(process, outcomes[process.contender], steps))

    def _process(self, contender: Contender) -> Process:
        known = self._processes.get(contender)
        if known is not None and known.failure is None:
            return known
        process = Process(contender, self._folder, limit=self.rules.limit, pin=self.rules.pin)
        self._processes[contender] = process
        return process


def _each(processes: list[Process], work: Callable[[Process], Any]) -> None:
    """Do it with all that have not failed. One that fails is ended at once, since it may still be busy."""
    for process in processes:
        if process.failure is None:
            try:
                work(process)
            except Failure as failure:
                process.failure = str(failure)
                process.end()


def _together(processes: list[Process], name: str, *arguments: Any) -> None:
    """Run a command in all processes concurrently, for untimed work."""
    _each(processes, lambda process: process.tell(name, *arguments))
    _each(processes, Process.answers)


def _compare(process: Process, outcome: Outcome, file: Path, names: set[str]) -> None:
    """Note how far its results are from the saved ones; too far is a failure."""
    found = {name: value for part in process.ask("differences", file) for name, value in part.items()}
    if missing := names - found.keys():
        raise Failure(f"wrong: it has no {min(missing)}, nor {len(missing) - 1} more of the results it should have")
    outcome.difference = max(found.values())
    if not outcome.difference <= TOLERANCE:
        raise Failure(f"wrong: its results differ from the loop's by {outcome.difference:.1e} of the largest")


def _note_turn(process: Process, outcome: Outcome, steps: int) -> None:
    seconds, faults = _turn(process, steps)
    outcome.seconds.append(seconds)
    outcome.faults.append(faults)


def _turn(process: Process, steps: int) -> tuple[float, float]:
    """Mean seconds and page faults of some steps in a row. Short ones follow one more, which finds the caches cold."""
    cold = int(steps > 1)
    ranks = process.ask("run", steps + cold)
    each = [(_span(ranks), sum(step.faults for step in ranks)) for ranks in zip(*ranks, strict=True)][cold:]
    seconds, faults = zip(*each, strict=True)
    return sum(seconds) / len(each), sum(faults) / len(each)


def _span(ranks: tuple[Step, ...]) -> float:
    """Return the time from when all ranks pass the barrier until the last one finishes."""
    return max(step.end for step in ranks) - max(step.start for step in ranks)


def _note_process(process: Process, outcome: Outcome) -> None:
    grown = process.ask("grown")
    outcome.grown = None if None in grown else sum(grown)
    outcome.threads = process.ask("threads")[0]

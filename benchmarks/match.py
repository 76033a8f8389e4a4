"""A match: all contenders on one task, in turns, and what came of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import track

from .contenders import LOOP, Contender, Task
from .process import Failure, Process
from .timing import repeats_within

TOLERANCE = 1e-3  # of the largest number in a gradient: float32, summed in another order


@dataclass
class Outcome:
    """Seconds of a step in each round, or why there are none."""

    seconds: list[float] = field(default_factory=list)
    grown: int | None = None  # bytes of resident memory, of all its processes
    difference: float | None = None  # from the loop's results
    failure: str | None = None


Outcomes = dict[Contender, Outcome]


@dataclass(frozen=True)
class Rules:
    """`turn` is how long the loop takes for the steps of a turn, in seconds; `limit` is for one answer.

    With `pin` our workers, the two loops, and the ranks of torch.distributed have cores of their own. With
    `preload` they import beforehand what the first step would, so that it is not taken for memory of the model.
    """

    rounds: int = 10
    turn: float = 0.1
    limit: float = 300.0
    pin: bool = True
    preload: bool = False


class Court:
    """Where the contenders' processes are kept from one task to the next; who fails gets a new one.

    fairscale's workers would keep an interpreter from ending, and torchgpipe starts threads in every run: hence a
    process for each.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._processes: dict[Contender, Process] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Court:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    def __exit__(self, *_: object) -> None:
        for end in (Process.dismiss, Process.end):
            for process in self._processes.values():
                end(process)
        self._stack.close()

    def play(self, task: Task, contenders: list[Contender], comparable: Callable[[Contender], bool]) -> Outcomes:
        """What came of each; `comparable` says whose results must be the loop's, which has to take part."""
        processes = [self._process(contender) for contender in contenders]
        outcomes = {contender: Outcome() for contender in contenders}
        loop = processes[contenders.index(LOOP)]
        if self.rules.preload:
            _together(processes, "preload")
        _together(processes, "prepare", task)
        _together(processes, "run", 1)
        if loop.failure is None:
            self._check([process for process in processes if comparable(process.contender)], loop, outcomes)
            self._rounds(task, processes, loop, outcomes)
            _each(processes, lambda process: _measure_memory(process, outcomes))
        for process in processes:
            failure = process.failure or (loop.failure and "not run, because the loop failed")
            if failure:
                outcomes[process.contender] = Outcome(failure=failure)
        return outcomes

    def _check(self, processes: list[Process], loop: Process, outcomes: Outcomes) -> None:
        file = self._folder / "results.pt"
        [names] = loop.ask("save", file)
        _each(processes, lambda process: _compare(process, outcomes[process.contender], file, names))

    def _rounds(self, task: Task, processes: list[Process], loop: Process, outcomes: Outcomes) -> None:
        steps = repeats_within(self.rules.turn, _seconds(loop, 2), most=50)
        for k in track(range(self.rules.rounds), f"{task.workload}, m={task.chunks}", transient=True):
            turns = processes[:: -1 if k % 2 else 1]  # so that nobody always comes after the same other
            _each(turns, lambda process: outcomes[process.contender].seconds.append(_seconds(process, steps)))

    def _process(self, contender: Contender) -> Process:
        known = self._processes.get(contender)
        if known is not None and known.failure is None:
            return known
        process = Process(contender, self._folder, limit=self.rules.limit, pin=self.rules.pin)
        self._processes[contender] = process
        return process


def _each(processes: list[Process], work: Callable[[Process], Any]) -> None:
    """Do it with all that are still in; who fails is out, and ended at once: it may be busy with something."""
    for process in processes:
        if process.failure is None:
            try:
                work(process)
            except Failure as failure:
                process.failure = str(failure)
                process.end()


def _together(processes: list[Process], name: str, *arguments: Any) -> None:
    """Side by side, for what is not timed."""
    _each(processes, lambda process: process.tell(name, *arguments))
    _each(processes, Process.answers)


def _compare(process: Process, outcome: Outcome, file: Path, names: set[str]) -> None:
    """Whether a step gives what the loop's gives; who is wrong is out."""
    found = {name: value for part in process.ask("differences", file) for name, value in part.items()}
    if missing := names - found.keys():
        raise Failure(f"wrong: it has no {min(missing)}, nor {len(missing) - 1} more of the loop's results")
    outcome.difference = max(found.values())
    if not outcome.difference <= TOLERANCE:
        raise Failure(f"wrong: its results differ from the loop's by {outcome.difference:.1e} of the largest")


def _seconds(process: Process, steps: int) -> float:
    """The mean of some steps in a row. Where they are short, one goes before them that finds the caches cold."""
    cold = int(steps > 1)
    ranks = process.ask("run", steps + cold)
    spans = [_span(runs) for runs in zip(*ranks, strict=True)][cold:]
    return sum(spans) / len(spans)


def _span(runs: tuple[tuple[float, float], ...]) -> float:
    """From when all ranks are through the barrier until the last of them is done."""
    return max(end for _, end in runs) - max(start for start, _ in runs)


def _measure_memory(process: Process, outcomes: Outcomes) -> None:
    grown = process.ask("grown")
    outcomes[process.contender].grown = None if None in grown else sum(grown)

"""Programs with a block of workers, without a pipe."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from streams import CPUStream, OutQueue, Task, spawn_workers

from .objects import active

COUNT = 3
"""The number of tasks per worker. The second one fails."""


class Work:
    """The tasks of two workers, and their progress.

    Attributes:
        put: the number of tasks in the queue of each worker so far.
        begun, ended: the tasks that have begun and ended.
    """

    def __init__(self) -> None:
        self.put = [0, 0]
        self.begun: Counter[tuple[int, int]] = Counter()
        self.ended: Counter[tuple[int, int]] = Counter()

    def task(self, k: int, number: int) -> Task[int]:
        return Task(CPUStream, compute=partial(self._compute, k, number))

    def _compute(self, k: int, number: int) -> int:
        self.begun[k, number] += 1
        active[-1].step(f"task {number} of worker {k}", pause=True)
        self.ended[k, number] += 1
        if number == 1:
            raise KeyboardInterrupt if k else ValueError
        return number


def block_of_workers() -> None:
    """Leave a block of workers whose tasks succeed and fail. Each task is answered once before the block ends.

    A KeyboardInterrupt may arrive anywhere, and is raised after the workers have ended.
    """
    work = Work()
    queues: list[OutQueue] = []
    try:
        with spawn_workers([torch.device("cpu")] * 2, shared=False) as (in_queues, out_queues):
            queues = out_queues
            for number in range(COUNT):
                for k, queue in enumerate(in_queues):
                    work.put[k] += 1
                    queue.put(work.task(k, number))
    except KeyboardInterrupt:
        pass
    active[-1].inject_nothing()
    expected = Counter((k, number) for k, count in enumerate(work.put) for number in range(count))
    assert work.ended == expected, f"the block was left after {work.ended} of {expected}"
    for k, queue in enumerate(queues):
        answers = [_described(queue.get()) for _ in range(work.put[k] + 1)]
        assert answers == _answers(k, work), answers
        assert queue.empty(), "more answers than tasks"
    assert work.begun == expected, f"the tasks {work.begun} were computed instead of {expected}"


def _answers(k: int, work: Work) -> list[Any]:
    """Return the expected answers of worker ``k``. The last one is None."""
    failure = KeyboardInterrupt if k else ValueError
    return [*([0, failure, 2][: work.put[k]]), None]


def _described(answer: Any) -> Any:
    succeeded, payload = answer
    if succeeded:
        return payload[1]
    return None if payload is None else payload[0]


WORKERS = {"workers": block_of_workers}

"""Processes that do what a test asks of them, together: a world of ranks that talk over gloo."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

RUNS = 30
"""Functions after which other processes take over: groups of meshes last, and listen, as long as their process."""

LIMIT = 900.0
"""Seconds after which a world counts as hanging."""


class World:
    """So many processes, started once: each call of :meth:`run` is a function that all of them call.

    Args:
        size: how many.
        timeout: seconds that they wait for each other.
    """

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        context = _context()
        self._folder = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = []
        self.processes = []
        self.runs = 0
        for rank in range(size):
            here, there = context.Pipe()
            arguments = rank, size, os.path.join(self._folder.name, "store"), timeout, there
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            there.close()
            self.connections.append(here)

    @property
    def is_fresh(self) -> bool:
        """Whether all processes are there, and have not yet so many groups that these take their time."""
        return self.runs < RUNS and all(process.is_alive() for process in self.processes)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank; the first traceback, if it raises anywhere."""
        answers = self.answers(function, *arguments)
        failed = [text for succeeded, text in answers if not succeeded]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def answers(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[tuple[bool, Any]]:
        """For each rank, whether it got to the end, and what it returned, or its traceback."""
        self.send(function, *arguments)
        return [self.answer(rank, limit) for rank in range(len(self.connections))]

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call on all ranks."""
        self.runs += 1
        for connection in self.connections:
            connection.send((function, arguments))

    def answer(self, rank: int, limit: float = LIMIT) -> tuple[bool, Any]:
        """Whether that rank got to the end of what it was sent, and what it returned, or its traceback."""
        try:
            if not self.connections[rank].poll(limit):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {limit:g} s")
            return self.connections[rank].recv()
        except (EOFError, ConnectionError):
            return False, "the process has ended"

    def close(self) -> None:
        """End all processes, whatever they do."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


def _context() -> Any:
    """What starts processes. Torch is imported once for all where the system can fork one that has done so."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    parts = [f"torch.distributed.{part}" for part in ("checkpoint", "fsdp", "tensor.parallel")]
    context.set_forkserver_preload(["gpipe.distributed", *parts, "hypothesis", "pytest"])
    return context


def of_each_size() -> Iterator[Callable[[int], World]]:
    """Worlds by their size; those of the same size are the same while they are fresh."""
    opened: dict[int, World] = {}

    def of(size: int) -> World:
        if size in opened and not opened[size].is_fresh:
            opened.pop(size).close()
        if size not in opened:
            opened[size] = World(size)
        return opened[size]

    yield of
    for each in opened.values():
        each.close()


@contextmanager
def world(size: int, timeout: float = 30.0) -> Iterator[World]:
    """A world of its own, for tests after which it is of no use any more."""
    opened = World(size, timeout)
    try:
        yield opened
    finally:
        opened.close()


def _serve(rank: int, size: int, store: str, timeout: float, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        function, arguments = connection.recv()
        try:
            answer: tuple[bool, Any] = True, function(*arguments)
        except BaseException:
            answer = False, f"rank {rank}: {traceback.format_exc()}"
        connection.send(answer)

"""A world of ranks connected by gloo: processes that run functions of a test together."""

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
"""Number of functions before processes are replaced, because groups of meshes live and listen until exit."""

LIMIT = 900.0
"""Timeout in seconds for a world."""


class World:
    """A number of processes, started once; :meth:`run` calls a function in all of them.

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
        """Return whether all processes are alive, and have not accumulated too many groups."""
        return self.runs < RUNS and all(process.is_alive() for process in self.processes)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of ``function(*arguments)`` on each rank, or fail with the first traceback."""
        answers = self.answers(function, *arguments)
        failed = [text for succeeded, text in answers if not succeeded]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def answers(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[tuple[bool, Any]]:
        """Return, for each rank, True and the result, or False and the traceback."""
        self.send(function, *arguments)
        return [self.answer(rank, limit) for rank in range(len(self.connections))]

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call on all ranks."""
        self.runs += 1
        for connection in self.connections:
            connection.send((function, arguments))

    def answer(self, rank: int, limit: float = LIMIT) -> tuple[bool, Any]:
        """Return True and the rank's result, or False and its traceback."""
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
    """Return a context to start processes, which forks a process that has imported torch if possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    parts = [f"torch.distributed.{part}" for part in ("checkpoint", "fsdp", "tensor.parallel")]
    context.set_forkserver_preload(["gpipe.distributed", *parts, "hypothesis", "pytest"])
    return context


def of_each_size() -> Iterator[Callable[[int], World]]:
    """Yield a function that returns a world of a size, reusing fresh ones."""
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
    """Open a separate world, for tests that leave it unusable."""
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

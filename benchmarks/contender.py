"""A contender's own process: does what it is told over a socket until told to end.

python -m benchmarks.contender SOCKET        # or both ranks of it, by torch.distributed.run
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from . import memory
from .contenders import Contender, Task
from .programs import Program, build, named_results


class Server:
    """The commands, each a method; what it returns is the answer."""

    program: Program | None = None
    output: Tensor | None = None

    def __init__(self, contender: Contender) -> None:
        self.contender = contender

    def prepare(self, task: Task) -> None:
        self.program = self.output = None  # the last one's memory, and threads
        self.program = build(self.contender, task)
        memory.forget_peak()
        self.before = memory.resident()

    def preload(self) -> None:
        """What torch itself imports when somebody first enters a dispatch mode or forks a generator."""
        importlib.import_module("torch._dynamo")

    def run(self, times: int) -> list[tuple[float, float]]:
        """When each run began and ended, on the clock that all processes share."""
        return [self._run() for _ in range(times)]

    def _run(self) -> tuple[float, float]:
        assert self.program is not None
        self.output = None
        self.program.prepare()
        start = time.monotonic()
        self.output = self.program.run()
        return start, time.monotonic()

    def grown(self) -> int | None:
        """Bytes of the peak of resident memory above what was there before the first run."""
        peak = memory.peak()
        return None if peak is None or self.before is None else max(0, peak - self.before)

    def save(self, file: Path) -> set[str]:
        """The names of the results that others are to have."""
        torch.save(self._results(), file)
        return set(self._results())

    def differences(self, file: Path) -> dict[str, float]:
        """From the saved results, by name, relative to the largest number in each."""
        wanted = torch.load(file)
        return {name: _difference(result, wanted[name]) for name, result in self._results().items()}

    def _results(self) -> dict[str, Tensor]:
        assert self.program is not None
        return named_results(self.program, self.output)


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def serve(address: str) -> None:
    with Client(address, family="AF_UNIX") as parent:
        parent.send((int(os.environ.get("RANK", "0")), os.getpid()))
        commands: SimpleQueue[Any] = SimpleQueue()
        Thread(target=_listen, args=(parent, commands), daemon=True).start()
        server = Server(commands.get())
        while (command := commands.get()) is not None:
            name, *arguments = command
            parent.send(_answer(getattr(server, name), arguments))


def _listen(parent: Connection, commands: SimpleQueue[Any]) -> None:
    """Hand commands on. Should the parent be gone, so is this process, whatever it hangs in."""
    try:
        while True:
            commands.put(parent.recv())
    except (EOFError, OSError):
        os._exit(1)


def _answer(work: Callable[..., Any], arguments: list[Any]) -> tuple[bool, Any]:
    """Whether it worked, and what came of it or why it did not."""
    try:
        return True, work(*arguments)
    except Exception as error:
        traceback.print_exc()
        return False, " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    serve(sys.argv[1])
    # fairscale's workers would keep the interpreter from ending.
    os._exit(0)

"""A contender's process, both ends: the parent starts it and asks with a time limit, the child does what it is asked.

python -m benchmarks.process SOCKET        # the child; or two of them, by torch.distributed.run
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from . import measure
from .contenders import IN_TWO_PROCESSES, Contender, Task
from .measure import Step
from .programs import Costs, Program, build, named_results

REPOSITORY = Path(__file__).parents[1]
MODULE = ["-m", "benchmarks.process"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Failure(Exception):  # noqa: N818
    """The contender failed, died, or did not answer in time; says why."""


class Process:
    """The parent's end. After a `failure`, no more commands are sent."""

    def __init__(self, contender: Contender, folder: Path, *, limit: float, pin: bool = True) -> None:
        self.contender, self.limit = contender, limit
        self.failure: str | None = None
        self._ranks = 2 if contender.library in IN_TWO_PROCESSES else 1
        self._connections: list[Connection] = []
        self._ids: list[int] = []
        address = tempfile.mktemp(dir=folder)  # the folder is ours alone
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(self._ranks)
        self._log = open(f"{address}.txt", "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *(TORCHRUN if self._ranks == 2 else []), *MODULE, address],
            cwd=REPOSITORY,
            env=_environment(contender, pin),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Call `Server`'s method `name` in each process, and return the results in order of ranks."""
        self.tell(name, *arguments)
        return self.answers()

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a command without waiting for answers, after the process has started: many start concurrently."""
        if not self._connections:
            self._connect()
        try:
            for connection in self._connections:
                connection.send((name, *arguments))
        except OSError as error:
            raise Failure(self._cause_of_death()) from error

    def answers(self) -> list[Any]:
        """Receive answers in order of ranks. Raise the first failure, as the other rank may be waiting forever."""
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + self.limit
        while missing := [connection for connection in self._connections if connection not in answers]:
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failure(f"no answer within {self.limit:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                worked, answers[connection] = self._received(connection)
                if not worked:
                    raise Failure(answers[connection])
        return [answers[connection] for connection in self._connections]

    def request_end(self) -> None:
        """Ask it to end, without waiting."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)

    def end(self) -> None:
        """Ask it to end, wait a moment, then kill all that it started."""
        self.request_end()
        if self._connections and self.failure is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self._kill()
        self._listener.close()
        self._log.close()
        for connection in self._connections:
            connection.close()

    def _kill(self) -> None:
        # torchrun's children are in separate sessions. The id of a reaped process may be reused.
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for number in self._ids:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        self._process.wait()

    def _connect(self) -> None:
        """Accept a connection from each rank, in whatever order they come."""
        found = {}
        for _ in range(self._ranks):
            (rank, number), connection = self._accepted()
            self._ids.append(number)
            found[rank] = connection
        self._connections = [found[rank] for rank in sorted(found)]
        for connection in self._connections:
            connection.send(self.contender)

    def _accepted(self) -> tuple[tuple[int, int], Connection]:
        deadline = time.monotonic() + self.limit
        self._listener.settimeout(1)
        while time.monotonic() < deadline:
            try:
                taken, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise Failure(self._cause_of_death()) from None
                continue
            taken.setblocking(True)
            connection = Connection(taken.detach())
            return self._received(connection), connection
        raise Failure(f"did not start within {self.limit:g} s")

    def _received(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise Failure(self._cause_of_death()) from error

    def _cause_of_death(self) -> str:
        """The last line it wrote, which is usually an error's message."""
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"died: {lines[-1].strip()}" if lines else "died without a message"


def _environment(contender: Contender, pin: bool) -> dict[str, str]:
    """Return the caller's environment, with its threads and allocator, except for settings of the contender."""
    own = {"GPIPE_PIN_WORKERS": str(int(pin)), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    threads = {} if contender.threads is None else {"OMP_NUM_THREADS": str(contender.threads)}
    return {**os.environ, **own, **threads}


class Server:
    """The child's end. Each method is a command; what it returns is the answer."""

    program: Program | None = None
    output: Tensor | None = None

    def __init__(self, contender: Contender) -> None:
        self.contender = contender

    def prepare(self, task: Task) -> None:
        """Build the model, the pipeline and the optimizer; nothing has run yet."""
        if self.contender.keep_memory:
            keep_memory()
        self.program = self.output = None  # end the last one's threads, free its memory
        self.program = build(self.contender, task)
        measure.reset_peak()
        self.before = measure.resident_memory()

    def run(self, times: int) -> list[Step]:
        return [self._run() for _ in range(times)]

    def _run(self) -> Step:
        assert self.program is not None
        self.output = None
        self.program.prepare()
        faults, start = measure.page_faults(), time.monotonic()
        self.output = self.program.run()
        return Step(start, time.monotonic(), measure.page_faults() - faults)

    def grown(self) -> int | None:
        """Return the growth of peak resident memory since before the first run, in bytes."""
        peak = measure.peak_memory()
        return None if peak is None or self.before is None else max(0, peak - self.before)

    def threads(self) -> int:
        """Return the number of intra-op threads, shared by workers."""
        return torch.get_num_threads()

    def costs(self) -> Costs | None:
        """Return the costs of an inline program's actions and optimizer."""
        assert self.program is not None
        return self.program.costs()

    def held(self) -> list[int]:
        """Bytes of parameters, gradients and the optimizer's state, for each device of this process."""
        assert self.program is not None
        return self.program.held()

    def save(self, file: Path) -> set[str]:
        """Save the results for others to compare with, and return their names."""
        torch.save(self._results(), file)
        return set(self._results())

    def differences(self, file: Path) -> dict[str, float]:
        """Return differences from the saved results by name, relative to the largest element of each."""
        wanted = torch.load(file)
        return {name: _difference(result, wanted[name]) for name, result in self._results().items()}

    def _results(self) -> dict[str, Tensor]:
        assert self.program is not None
        return named_results(self.program, self.output)


_KEEPING = {
    -3: 2**25,  # M_MMAP_THRESHOLD, its maximum: larger blocks have a mapping each, which is freed at once
    -1: 2**30,  # M_TRIM_THRESHOLD: free bytes at the end of a heap that are not returned
    -2: 2**26,  # M_TOP_PAD: bytes added when a heap grows, and retained when it shrinks
}
"""The numbers are of the GNU C library's malloc.h; its manual has a page on each (mallopt)."""


def keep_memory() -> None:
    """Have the C library keep freed memory for later allocations, instead of returning it after every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(mallopt(setting, value) != 1 for setting, value in _KEEPING.items()):
        raise RuntimeError("only the GNU C library can be configured to keep memory; this process uses a different one")


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def serve(address: str) -> None:
    """Answer the parent's commands until it sends None."""
    with Client(address, family="AF_UNIX") as parent:
        parent.send((int(os.environ.get("RANK", "0")), os.getpid()))
        commands: SimpleQueue[Any] = SimpleQueue()
        Thread(target=_listen, args=(parent, commands), daemon=True).start()
        server = Server(commands.get())
        while (command := commands.get()) is not None:
            name, *arguments = command
            parent.send(_answer(getattr(server, name), arguments))


def _listen(parent: Connection, commands: SimpleQueue[Any]) -> None:
    """Queue the parent's commands. When the parent exits, exit this process, even if its main thread is blocked."""
    try:
        while True:
            commands.put(parent.recv())
    except (EOFError, OSError):
        os._exit(1)


def _answer(work: Callable[..., Any], arguments: list[Any]) -> tuple[bool, Any]:
    """Return True and the result, or False and the error's message."""
    try:
        return True, work(*arguments)
    except Exception as error:
        traceback.print_exc()
        return False, " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    serve(sys.argv[1])
    # fairscale's workers would keep the interpreter from ending.
    os._exit(0)

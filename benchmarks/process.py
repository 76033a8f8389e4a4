"""The parent's side of a contender: start it, ask it with a time limit, end it whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .contenders import Contender

HOUSE = Path(__file__).parents[1]
MODULE = ["-m", "benchmarks.contender"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Failure(Exception):  # noqa: N818
    """The contender failed, died, or did not answer in time; says why."""


class Process:
    """A contender at work; `failure` says why it is out, if it is."""

    def __init__(self, contender: Contender, folder: Path, *, limit: float, pin: bool = True) -> None:
        self.contender, self.limit = contender, limit
        self.failure: str | None = None
        self._ranks = 2 if contender.library == "distributed" else 1
        self._connections: list[Connection] = []
        self._numbers: list[int] = []
        address = tempfile.mktemp(dir=folder)  # the folder is ours alone
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(address)
        self._door.listen(self._ranks)
        self._written = open(f"{address}.txt", "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *(TORCHRUN if self._ranks == 2 else []), *MODULE, address],
            cwd=HOUSE,
            env=_environment(pin),
            stdout=self._written,
            stderr=self._written,
            start_new_session=True,
        )

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """The answers of its processes, one for each rank."""
        self.tell(name, *arguments)
        return self.answers()

    def tell(self, name: str, *arguments: Any) -> None:
        """Ask, and leave the answers for later. Waits for the process to start if it must: many start side by side."""
        if not self._connections:
            self._meet()
        try:
            for connection in self._connections:
                connection.send((name, *arguments))
        except OSError as error:
            raise Failure(self._epitaph()) from error

    def answers(self) -> list[Any]:
        """In order of ranks. The first failure counts: the other rank may wait for this one for ever."""
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

    def dismiss(self) -> None:
        """Ask it to end, so that several do so side by side."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)

    def end(self) -> None:
        """Ask it to end, give it a moment, then kill all that it started."""
        self.dismiss()
        if self._connections and self.failure is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self._kill()
        for thing in (self._door, self._written, *self._connections):
            thing.close()

    def _kill(self) -> None:
        # torchrun's children have sessions of their own; a process that was waited for may have lent its number.
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for number in self._numbers:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        self._process.wait()

    def _meet(self) -> None:
        """Ranks arrive in any order."""
        found = {}
        for _ in range(self._ranks):
            (rank, number), connection = self._accepted()
            self._numbers.append(number)
            found[rank] = connection
        self._connections = [found[rank] for rank in sorted(found)]
        for connection in self._connections:
            connection.send(self.contender)

    def _accepted(self) -> tuple[tuple[int, int], Connection]:
        deadline = time.monotonic() + self.limit
        self._door.settimeout(1)
        while time.monotonic() < deadline:
            try:
                taken, _ = self._door.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise Failure(self._epitaph()) from None
                continue
            taken.setblocking(True)
            connection = Connection(taken.detach())
            return self._received(connection), connection
        raise Failure(f"did not start within {self.limit:g} s")

    def _received(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise Failure(self._epitaph()) from error

    def _epitaph(self) -> str:
        """The last thing it wrote."""
        self._written.seek(0)
        lines = [line for line in self._written.read().decode(errors="replace").splitlines() if line.strip()]
        return f"died: {lines[-1].strip()}" if lines else "died without a word"


def _environment(pin: bool) -> dict[str, str]:
    """One intra-op thread, and the modules that are found from here."""
    own = {
        "OMP_NUM_THREADS": "1",
        "GPIPE_PIN_WORKERS": str(int(pin)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return {**os.environ, **own}

# ruff: noqa: E501
"""Plant faults of order, and check that the exploration notices them.

    python -m packages.gpipe.tests.interleavings.planted [numbers] [--suite]

A fault removes a lock, loses a wake-up, or moves a check or a flag to the wrong time. Each is planted in the sources of
a fresh process, which explores the scenarios that use the line. With ``--suite``, the process runs the tests with real
threads instead, until one fails or hangs.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch  # noqa: F401  # before the forks, which takes seconds

ROOT = Path(__file__).parents[4]
CPU_SECONDS = {"explored": 120, "tested": 1200}
"""The most CPU time per fault."""
SECONDS = 3600
"""The most wall-clock time per fault. It is longer, because other processes may be busy."""


class Fault(NamedTuple):
    """A change of one module, and the scenarios that should notice it."""

    what: str
    module: str
    before: str
    after: str
    scenarios: tuple[str, ...]


WORKER, SPAWN, CONTEXT = "streams._worker", "streams._spawn", "streams._context"
WORKERS, RUN, EXCLUSIVE = "gpipe.engine._workers", "gpipe.engine._run", "gpipe.engine._run_lock"
FAILURES, ACCUMULATE, LINK = "gpipe.engine._failures", "gpipe.engine._accumulate", "gpipe.transport._transport"
RANDOM, ATTENTION, FORWARD = "gpipe.checkpoint._random", "gpipe.checkpoint._attention", "gpipe.model._forward"
GENERATORS, POOL, STATE = "gpipe.model._generators", "gpipe.model._pipeline", "gpipe.model._stage_run"
UPDATES, MINI_BATCH, TIED = "gpipe.engine._updates", "gpipe.engine._mini_batch", "gpipe.engine._tied"

STEP, CALL, TWO = ("1f1b",), ("call",), ("two-callers", "two-callers-call")
MODEL = ("1f1b-model", "call-model")
FAILING = ("failure-in-first-stage", "failure-in-last-stage", "two-failures")

STOPPED = (
    "            try:\n                stop()\n            finally:\n"
    "                # Again after an interrupt, because workers that wait for each other would never end. The workers are\n"
    "                # ended even after an interrupt here, because they must not compute while the next run does.\n"
    "                try:\n                    stop()\n                finally:\n                    scope.close()\n            raise"
)
"""The end of a failed or interrupted run."""
FAULTS = [
    # streams
    Fault("a worker does not report its end", WORKER, "        out_queue.put((False, None))", "        pass", ("workers",)),
    Fault("a worker answers twice", WORKER, "out_queue.put(failure or _answer(task))",
          "answer = failure or _answer(task); out_queue.put(answer); out_queue.put(answer)", STEP),
    Fault("a worker lets an interrupt or failure of its task end it", WORKER,
          "    except BaseException as error:\n        return False, _exc_info(error)\n\n\ndef _exc_info",
          "    except KeyError as error:\n        return False, _exc_info(error)\n\n\ndef _exc_info", ("workers",)),
    Fault("ended is set before the last task", "streams._exit", "    try:\n        yield\n    finally:\n        ended.set()",
          "    ended.set()\n    try:\n        yield\n    finally:\n        pass", ("workers",)),
    Fault("ended is never set", "streams._exit", "        ended.set()\n", "", STEP),
    Fault("the block does not stop its workers", SPAWN, "        for each in self._workers:\n            each.in_queue.put(None)\n        for",
          "        for", STEP),
    Fault("the block stops only the first worker", SPAWN, "        for each in self._workers:\n            each.in_queue.put(None)\n        for",
          "        for each in self._workers[:1]:\n            each.in_queue.put(None)\n        for", STEP),
    Fault("a freed block does not stop its workers", SPAWN, "weakref.ref(block, self.in_queue.put)", "weakref.ref(block)", ("freed-between",)),
    Fault("the reference that tells a worker is freed with its block", SPAWN, "partial(nullcontext, freed), partial(watched",
          "partial(watched", ("freed-between",)),
    Fault("an interrupted exit does not wait for the other workers", SPAWN,
          "            # After an interrupt, end all workers before raising it.\n            self._end_all()\n            raise",
          "            raise", STEP),
    Fault("the exit does not join", SPAWN, "                each.ended.wait()\n                each.thread.join()", "                pass", STEP),
    # the workers of a pipe
    Fault("a failed run does not stop the others", WORKERS, STOPPED,
          "            scope.close()\n            raise", STEP),
    Fault("a failed run does not end the workers", WORKERS, STOPPED,
          "            stop()\n            self._scope = scope\n            raise", STEP),
    Fault("workers are ended before they are stopped", WORKERS, STOPPED,
          "            scope.close()\n            stop()\n            raise", STEP),
    Fault("a second interrupt leaves workers that compute", WORKERS, "                try:\n                    stop()\n                finally:\n                    scope.close()\n",
          "                stop()\n                scope.close()\n", ("two-signals-in-first-stage",)),
    Fault("only the first answer is taken", WORKERS, "results = [_result(queue.get()) for queue in out_queues]",
          "results = [_result(queue.get()) for queue in out_queues[:1]]", ("1f1b", "call")),
    Fault("close forgets the workers", WORKERS, "        if scope is not None and self._process == os.getpid():\n            scope.close()", "        pass", STEP),
    # failures
    Fault("failures are not recorded", RUN, "            failures.add(step, self._explain_error(error, step))\n", "", STEP),
    Fault("readers are woken before the failure is recorded", RUN,
          "            failures.add(step, self._explain_error(error, step))\n            self._transport.cancel()",
          "            self._transport.cancel()\n            failures.add(step, self._explain_error(error, step))",
          FAILING),
    Fault("readers are not woken", RUN, "            failures.add(step, self._explain_error(error, step))\n            self._transport.cancel()",
          "            failures.add(step, self._explain_error(error, step))", STEP),
    Fault("a stop does not wake readers", RUN, "        self.state.failures.stop()\n        self._transport.cancel()",
          "        self.state.failures.stop()", STEP),
    Fault("a stop wakes readers and is recorded later", RUN, "        self.state.failures.stop()\n        self._transport.cancel()",
          "        self._transport.cancel()\n        self.state.failures.stop()", ("unreadable-failure",)),
    Fault("a stop is not recorded", RUN, "        self.state.failures.stop()\n        self._transport.cancel()",
          "        self._transport.cancel()", STEP),
    Fault("a step after a failure is executed", FAILURES, "return self.earliest is not None and self._when(step) > self.earliest",
          "return False", STEP),
    Fault("a later failure hides an earlier one", FAILURES,
          "            self.earliest = when if self.earliest is None else min(self.earliest, when)\n\n    def add_remote",
          "            self.earliest = when\n\n    def add_remote", ("two-failures-middle",)),
    Fault("the failure that arrives last is raised", FAILURES, "raise min(errors, key=lambda pair: pair[0])[1]", "raise errors[-1][1]",
          ("two-failures",)),
    Fault("a cancelled reader continues to wait", LINK, "            elif self._is_cancelled():\n                raise Cancelled\n", "",
          FAILING),
    Fault("only gradients are cancelled", LINK, "        self.values.cancel()\n", "", STEP),
    Fault("only values are cancelled", LINK, "        self.gradients.cancel()\n", "", STEP),
    Fault("a reader does not check whether its payload will arrive", LINK, "            elif self._is_cancelled():", "            elif True:",
          ("two-failures-3-stages",)),
    # one run at a time
    Fault("several threads may run a pipe", EXCLUSIVE, "with waiting_for(self), self._lock:", "with waiting_for(self):", TWO),
    Fault("parameters are not claimed", MINI_BATCH, "    run = Run(pipeline, spec)\n    pipeline.run_lock.claim(run.parameters)\n", "    run = Run(pipeline, spec)\n", ("shared-parameters",)),
    Fault("parameters are claimed after the check", EXCLUSIVE, "            _claimed[self] = parameters\n", "            pass\n",
          ("shared-parameters",)),
    Fault("the claim is not released", EXCLUSIVE, "                    _claimed.pop(self, None)\n", "                    pass\n", STEP),
    Fault("a cycle of waits is not detected", EXCLUSIVE, "            _expect_no_cycle(wanted, {*mine})\n", "", ("each-other",)),
    Fault("a wait is recorded after the check of both", EXCLUSIVE, "            _waits[get_ident()] = mine, wanted\n", "", ("each-other",)),
    Fault("a piece keeps the generators while it waits for a run lock", EXCLUSIVE, "            held.pause()\n", "            held = None\n",
          ("pipe-in-a-block", "pipe-between-blocks")),
    Fault("close does not wait for a run", "gpipe._gpipe", "        self._workers.run_lock.run(self._workers.close)",
          "        self._workers.close()", ("closed-while-computing",)),
    # gradients and random numbers
    Fault("copies of tied weights are not summed", RUN, "return add_to({}, self._tied.map_to_owners(gradients) if self._tied.shares else gradients)",
          "return add_to({}, gradients)", ("1f1b-tied",)),
    Fault("the seed is drawn without a lock", RANDOM, "        with self._lock:\n            # Not", "        if True:\n            # Not",
          ("two-seeds",)),
    Fault("the lock of the seeds is shared by all runs", RANDOM, "        self._lock = waiting.Lock()", "        self._lock = lock_of_all_runs()",
          ("nested-seeds",)),
    Fault("Python's generator has one state for all", GENERATORS, "super().__init__(thing, _lock if lock is None else lock)", "super().__init__(thing, fork_lock())",
          ("two-pieces",)),
    # attention
    Fault("attentions do not wait for other choices", ATTENTION, "            while self._running and self._now != kernels:\n                self._changed.wait()\n",
          "", ("attentions",)),
    Fault("the end of an attention wakes no waiting thread", ATTENTION, "                self._changed.notify_all()\n", "                pass\n", ("attentions",)),
    Fault("an attention checks only once", ATTENTION, "            while self._running and self._now", "            if self._running and self._now",
          ("attentions",)),
    Fault("an interrupted attention does not end its turn", ATTENTION,
          "            finally:  # again after an interrupt, because other choices would otherwise wait forever\n                self._end(turn)",
          "            finally:\n                pass", ("attentions",)),
    # the forward of a model
    Fault("the forward does not report that it has stopped", FORWARD, "        self._stopped.release()\n        self._go.acquire()",
          "        self._go.acquire()", MODEL),
    Fault("the worker does not wait for the forward", FORWARD, "            self._go.release()\n            self._stopped.acquire()\n            self._work, ",
          "            self._go.release()\n            self._work, ", MODEL),
    Fault("the forward does not wait for its turn", FORWARD, "        self._stopped.release()\n        self._go.acquire()",
          "        self._stopped.release()", MODEL),
    Fault("is over is set after the worker was woken", FORWARD, "            self._is_over = True\n            self._stopped.release()",
          "            self._stopped.release()\n            self._is_over = True", ("failure-in-one-stage",)),
    Fault("a failed forward does not report its end", FORWARD, "            self._is_over = True\n            self._stopped.release()",
          "            self._is_over = True", MODEL),
    Fault("an abandoned forward is not woken", FORWARD, "            while not self._is_over:  # again if the model catches the exception and continues\n                self._go.release()\n                self._stopped.acquire()\n",
          "", ("failure-in-last-block",)),
    Fault("an abandoned forward is woken only once", FORWARD, "            while not self._is_over:", "            if not self._is_over:",
          ("failure-is-caught",)),
    Fault("an interrupted run abandons only some forwards", STATE, "            except BaseException:\n                # After an interrupt, end all forwards",
          "            except KeyError:\n                # After an interrupt, end all forwards", ("failure-with-waiting-forwards",)),
    Fault("the threads of forwards do not end", POOL, "            self._ending.shutdown()\n", "            _kept.append(self._ending)\n", MODEL),
    Fault("an interrupted close forgets its threads", POOL,
          "        if self._pool is not None:\n            self._ending, self._pool = self._pool, None\n        if self._ending is not None and self._process == os.getpid():\n            self._ending.shutdown()\n        self._ending = None",
          "        pool, self._pool = self._pool, None\n        if pool is not None:\n            pool.shutdown()", MODEL),
]  # fmt: skip
EXTRA = {
    POOL: "\n_kept = []\n",
    RANDOM: """
_locks = []

def lock_of_all_runs():
    from packages.streams.tests.interleavings.objects import active

    if not _locks or _locks[0] is not active[-1]:
        _locks[:] = active[-1], waiting.Lock()  # a lock of this exploration
    return _locks[1]
""",
}


def planted_source(fault: Fault) -> tuple[Path, str]:
    package = fault.module.partition(".")[0]
    path = ROOT / "packages" / package / "src" / Path(*fault.module.split(".")).with_suffix(".py")
    text = path.read_text()
    assert text.count(fault.before) == 1, f"{fault.what}: {text.count(fault.before)} places"
    planted = text.replace(fault.before, fault.after) + EXTRA.get(fault.module, "")
    compile(planted, str(path), "exec")  # a syntax error would count as noticed
    return path, planted


def explored(fault: Fault) -> int:
    """Explore the scenarios of a fault, first with few orders and failures of each. Return the status."""
    explorer = importlib.import_module("packages.gpipe.tests.interleavings.__main__")
    return int(any(explorer.main([*fault.scenarios, "--most", most]) for most in ("40", "250")))


SUITE = [f"packages/gpipe/tests/{each}" for each in ("engine", "transport", "module")] + ["packages/streams/tests"]


def tested(fault: Fault) -> int:
    """Run the tests with real threads until one fails or hangs. Return the status."""
    options = ["-x", "-q", "--timeout=60", "--timeout-method=thread", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *SUITE, "--ignore=packages/streams/tests/test_interleavings.py"]))


def notice(fault: Fault, work: Callable[[Fault], int]) -> tuple[bool, str]:
    """Return whether ``work`` notices a fault, and the last line that it prints about an error.

    It runs in a fork of this process, which has imported torch but none of our packages.
    """
    path, source = planted_source(fault)
    assert "gpipe" not in sys.modules
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS[work.__name__],) * 2)
        sys.meta_path.insert(0, _Planted(fault.module, path, source))
        status = 1
        try:
            status = work(fault)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(write)
    timer = threading.Timer(SECONDS, lambda: os.kill(child, signal.SIGKILL))
    timer.start()
    with os.fdopen(read, errors="replace") as output:
        text = output.read()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    lines = [each for each in text.splitlines() if each and not each.startswith(" ")]
    errors = [each for each in lines if "Error" in each or "Interrupt" in each]
    # A process that took too long was killed, and does not count as having noticed the fault.
    return os.WIFEXITED(status) and status != 0, (errors or lines or ["nothing"])[-1]


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self._module, self._path, self._source = module, path, source

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), vars(module))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="planted")
    parser.add_argument("numbers", nargs="*", type=int, help="numbers of faults; all by default")
    parser.add_argument("--suite", action="store_true", help="run the tests with real threads instead")
    options = parser.parse_args(arguments)
    chosen = [FAULTS[each] for each in options.numbers] or FAULTS
    noticed = 0
    for fault in chosen:
        begin = time.monotonic()
        found, why = notice(fault, tested if options.suite else explored)
        noticed += found
        mark = "noticed" if found else "MISSED "
        print(f"{mark} {time.monotonic() - begin:6.1f} s  {fault.what}: {why[:90]}", flush=True)
    print(f"{noticed} of {len(chosen)} noticed")
    return 0 if noticed >= 0.95 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

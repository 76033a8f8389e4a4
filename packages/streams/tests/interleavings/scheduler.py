"""Run real threads one at a time. At each operation that may wait, the thread that continues is a choice."""

from __future__ import annotations

import _thread
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

from .choices import Chooser, Option

GO, TIMEOUT, FAIL, INTERRUPT, INTERRUPT_AFTER = "go", "timeout", "fail", "interrupt", "interrupt after"
MOST_STEPS = 200_000
MOST_TIMEOUTS = 50
"""The most consecutive timeouts without other events. A program with more of them hangs."""
PATIENCE = 120.0
"""Real seconds. A thread that takes longer waits for something that the scheduler does not control."""


class DeadlockError(Exception):
    """No thread can continue. The message includes the stack of each thread."""


class InjectedError(Exception):
    """A failure, injected where the program under test allows one."""


class _Aborted(BaseException):
    """Ends the threads of an aborted program."""


class Operation(NamedTuple):
    """The pending operation of a thread.

    Attributes:
        name: a description.
        ready: returns whether the operation can run without waiting.
        timed: whether the wait has a timeout.
        fails: whether a failure can be injected here.
        call: whether it is a call, after which the interpreter may raise KeyboardInterrupt. A ``with lock`` is not.
        pause: whether other threads may continue without a preemption, as if the thread waited.
    """

    name: str
    ready: Callable[[], bool]
    timed: bool = False
    fails: bool = False
    call: bool = False
    pause: bool = False


def _always() -> bool:
    return True


class Task:
    """A thread of the program, with its state in the scheduler."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.pending: Operation | None = None
        self.outcome = GO
        self.is_done = False
        self.ident = 0
        self.thread: threading.Thread | None = None
        self._baton = _thread.allocate_lock()
        self._baton.acquire()

    def go_on(self) -> None:
        with suppress(RuntimeError):  # an abort releases all threads, whether they wait or not
            self._baton.release()

    def stop(self) -> None:
        if not self._baton.acquire(timeout=PATIENCE):
            raise DeadlockError(f"{self.name} was not resumed within {PATIENCE:g} s; stacks:\n{stacks()}")


class Scheduler:
    """Runs a program whose threads use the objects of ``objects``, in an order determined by ``chooser``.

    Args:
        chooser: chooses among the options at each step.
        lines: the files in which each line is also a step.
        injects: the kinds of injected events among the options: failures, and KeyboardInterrupt in the main thread.

    Attributes:
        steps: the number of steps so far.
        events: a description of each step. The message of a failure includes the last ones.
        escaped: exceptions that ended a thread, or were reported.
        objects: the locks, queues and so on of the program.
    """

    def __init__(self, chooser: Chooser, *, lines: Collection[str] = (), injects: Collection[str] = ()) -> None:
        self._chooser = chooser
        self._lines = tuple(lines)
        self._injects = frozenset(injects)
        self.steps = 0
        self.events: list[str] = []
        self.escaped: list[BaseException] = []
        self.objects: list[Any] = []
        self._timeouts = 0
        self._signal = False
        self._error: BaseException | None = None
        self._ended: threading.Thread | None = None
        self.main = Task(0, "main")
        self.main.ident = _thread.get_ident()
        self.tasks = [self.main]
        self.current = self.main
        self.is_over = False

    # Called by the threads of the program.

    def controls_this_thread(self) -> bool:
        return not self.is_over and self.current.ident == _thread.get_ident()

    def inject_nothing(self) -> None:
        """Inject no failures or interrupts in the rest of the program."""
        self._injects = frozenset()

    def report(self, error: BaseException) -> None:
        """Make the program fail with ``error``, even if the code under test catches it."""
        self.escaped.append(error)

    def interrupt_main(self) -> None:
        """Raise KeyboardInterrupt in the main thread when it continues, as a signal does."""
        self._signal = True

    def step(
        self,
        name: str,
        ready: Callable[[], bool] = _always,
        *,
        timed: bool = False,
        fails: bool = False,
        call: bool = False,
        pause: bool = False,
    ) -> str:
        """Let the chooser pick the thread that continues. Return once it is this one, and its operation is ready.

        Returns:
            ``"go"``; ``"timeout"`` if the wait has timed out; ``"interrupt after"`` if KeyboardInterrupt must be raised
            after the operation.
        """
        if self._error is not None and not self.is_over:
            raise _Aborted
        if not self.controls_this_thread():
            # The program has ended, or this code runs while a thread is freed. No other thread runs.
            if not ready() and not timed:
                raise DeadlockError(f"{name} would wait forever after the end of the program")
            return GO if ready() else TIMEOUT
        me = self.current
        me.pending = Operation(name, ready, timed, fails, call, pause)
        if self._switched(me):
            me.stop()
        return self._resumed(me)

    def _resumed(self, me: Task) -> str:
        if self._error is not None:
            raise _Aborted
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.real_join(PATIENCE)  # the thread frees its local variables, which may take steps
        me.pending = None
        if me.outcome == FAIL:
            raise InjectedError(self.events[-1])
        if me.outcome == INTERRUPT:
            raise KeyboardInterrupt
        return me.outcome

    def _switched(self, me: Task) -> bool:
        """Choose a thread, and continue it. Return False if it is ``me``."""
        try:
            task, outcome = self._chosen(me)
        except BaseException as error:
            self._abort(error)
            raise _Aborted from None
        task.outcome = outcome
        self.current = task
        if task is me:
            return False
        task.go_on()
        return True  # ``self.current`` cannot be compared, since the other thread may have changed it

    def _chosen(self, me: Task) -> tuple[Task, str]:
        options = self.options(me)
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise DeadlockError(f"the program does not end: {self.steps} steps; the last ones:\n{self.story()}")
        index = self._chooser.choose(options, len(self.events)) if len(options) > 1 else 0
        _, outcome, _, number, name = options[index]
        self._signal = self._signal and outcome != INTERRUPT
        self._timeouts = self._timeouts + 1 if outcome == TIMEOUT else 0
        self.events.append(f"{self.tasks[number].name}: {name}" + ("" if outcome == GO else f" -> {outcome}"))
        return self.tasks[number], outcome

    def options(self, me: Task) -> list[Option]:
        """Return the possible next events. By default, ``me`` continues, or else the oldest thread that can."""
        pending = [(task, task.pending) for task in self.tasks if task.pending is not None]
        pending.sort(key=lambda pair: pair[0] is not me)
        able = [(task, operation) for task, operation in pending if operation.ready() or self._is_signalled(task)]
        mine = any(task is me and not operation.pause for task, operation in able)
        found = [
            Option(int(mine and task is not me), self._default(task), 0, task.number, each.name) for task, each in able
        ]
        late = [(task, each) for task, each in pending if each.timed and not each.ready()]
        if not able and (not late or self._timeouts >= MOST_TIMEOUTS):
            raise DeadlockError(f"no thread can go on; the last steps:\n{self.story()}\nstacks:\n{stacks(self.tasks)}")
        found += [Option(int(bool(able)), TIMEOUT, 0, task.number, each.name) for task, each in late]
        if FAIL in self._injects:
            found += [Option(0, FAIL, 1, task.number, each.name) for task, each in able if each.fails]
        for task, each in pending[:] if INTERRUPT in self._injects else []:
            if task is self.main:
                found.append(Option(0, INTERRUPT, 1, task.number, each.name))
                if each.call and each.ready():
                    found.append(Option(0, INTERRUPT_AFTER, 1, task.number, each.name))
        return found

    def _is_signalled(self, task: Task) -> bool:
        return self._signal and task is self.main

    def _default(self, task: Task) -> str:
        return INTERRUPT if self._is_signalled(task) else GO

    # Threads.

    def new_task(self, thread: threading.Thread) -> Task:
        # The name of the thread may contain the number of threads of the process, so it is not used.
        task = Task(len(self.tasks), f"thread {len(self.tasks)}")
        task.thread = thread
        task.pending = Operation("begin", _always)
        self.tasks.append(task)
        return task

    def run_task(self, task: Task, work: Callable[[], None]) -> None:
        """Run ``work`` on its own thread once it is chosen."""
        task.ident = _thread.get_ident()
        try:
            task.stop()
            self._resumed(task)
            with self.traced():
                work()
        except _Aborted:
            pass
        except BaseException as error:
            self.escaped.append(error)
        finally:
            self._end(task)

    def _end(self, task: Task) -> None:
        task.is_done, task.pending = True, None
        if self._error is not None or all(each.is_done for each in self.tasks):
            return
        try:
            following, outcome = self._chosen(task)
        except BaseException as error:
            self._abort(error)
            return
        self._ended = task.thread
        following.outcome, self.current = outcome, following
        following.go_on()

    def traced(self) -> Any:
        return _Traced(self._trace if self._lines else None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._lines):
            return None
        if event == "line" and self.controls_this_thread():
            self.step(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        return self._trace

    # The program.

    def run(self, program: Callable[[], Any]) -> Any:
        """Return the result of ``program`` after all its threads have ended.

        Raises:
            DeadlockError: no thread could continue, or a thread is left at the end.
            BaseException: this exception ended a thread, or was reported.
        """
        report = sys.unraisablehook
        sys.unraisablehook = lambda one: None if one.exc_type is _Aborted else report(one)
        try:
            with self.traced():
                result = program()
            self._finish()
            return result
        except _Aborted:
            assert self._error is not None
            raise self._error from None
        finally:
            self._abort(self._error or DeadlockError("the program has ended"))
            self._join()
            self.is_over = True
            sys.unraisablehook = report

    def _finish(self) -> None:
        """Continue the other threads until they end."""
        self._injects = frozenset()
        others = self.tasks[1:]
        while any(not task.is_done for task in others):
            if not any(task.pending and (task.pending.ready() or task.pending.timed) for task in others):
                left = [task.name for task in others if not task.is_done]
                error = DeadlockError(f"threads are left: {left}; stacks:\n{stacks(self.tasks)}")
                self._abort(error)
                raise _Aborted
            self.step("end", lambda: not any(task.pending and task.pending.ready() for task in self.tasks[1:]))
        if self._ended is not None:
            self._ended.real_join(PATIENCE)
        if self.escaped:
            raise self.escaped[0]

    def _abort(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        for task in self.tasks:
            if task.ident != _thread.get_ident() and not task.is_done:
                task.go_on()

    def _join(self) -> None:
        for task in self.tasks[1:]:
            if task.thread is not None and task.thread.ident is not None:
                task.thread.real_join(PATIENCE)  # type: ignore[attr-defined]

    def story(self, most: int = 40) -> str:
        return "\n".join(f"  {event}" for event in self.events[-most:])


class _Traced:
    """Set the trace function of this thread inside a ``with`` block."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        if self._function is not None:
            sys.settrace(self._function)

    def __exit__(self, *error: object) -> None:
        if self._function is not None:
            sys.settrace(self._before)


def stacks(tasks: Collection[Task] = ()) -> str:
    """Return the stack of each thread that has not ended, without the frames of the scheduler."""
    frames = sys._current_frames()
    named = {task.ident: _description(task) for task in tasks}
    known = {each.ident or 0: each.name for each in threading.enumerate()} if not tasks else {}
    found = []
    for ident, name in {**known, **named}.items():
        if ident in frames:
            lines = [line for line in traceback.format_stack(frames[ident]) if "/interleavings/" not in line]
            found.append(f"{name}:\n{''.join(lines[-12:])}")
    return "\n".join(found)


def _description(task: Task) -> str:
    name = task.name if task.thread is None else f"{task.name} ({task.thread.name})"
    return f"{name} at {'?' if task.pending is None else task.pending.name}"

"""Real threads, exactly one of which runs at a time. Which one goes on is a choice, at each operation that may wait."""

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
"""In a row, while nothing else happens. A program that goes on like this forever hangs."""
PATIENCE = 120.0
"""Real seconds. A thread that does not come back waits for something that the scheduler does not control."""


class DeadlockError(Exception):
    """No thread can go on. The message has the stack of each."""


class InjectedError(Exception):
    """Raised where the program under test allows a failure."""


class _Aborted(BaseException):
    """Ends the threads of a program that is given up."""


class Operation(NamedTuple):
    """What a thread is about to do.

    Attributes:
        name: describes it.
        ready: returns whether it can be done without waiting.
        timed: whether the thread stops waiting after some time.
        fails: whether a failure can be injected here.
        call: whether it is a call, after which the interpreter may raise KeyboardInterrupt; a ``with lock`` is not.
        pause: whether other threads may go on without a preemption, as if the thread waited.
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
    """A thread of the program, as the scheduler sees it."""

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
        with suppress(RuntimeError):  # a program that is given up lets all threads go on
            self._baton.release()

    def stop(self) -> None:
        if not self._baton.acquire(timeout=PATIENCE):
            raise DeadlockError(f"{self.name} was not resumed within {PATIENCE:g} s; stacks:\n{stacks()}")


class Scheduler:
    """Runs a program whose threads use the objects of ``objects``, with the orders that ``chooser`` chooses.

    Args:
        chooser: chooses among the options at each step.
        lines: the files in which each line is a step, too.
        injects: whether KeyboardInterrupt in the main thread, and failures, are among the options.

    Attributes:
        steps: the number of steps so far.
        events: describes each step; the last ones are in the message of a failure.
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
        """Let the program fail with ``error``, even if the code under test catches it."""
        self.escaped.append(error)

    def interrupt_main(self) -> None:
        """Raise KeyboardInterrupt in the main thread when it goes on, as a signal does."""
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
        """Let the chooser decide who goes on; return when it is this thread, and the operation is ready.

        Returns:
            ``"go"``; ``"timeout"`` if the thread has waited for too long; ``"interrupt after"`` if KeyboardInterrupt
            has to be raised after the operation.
        """
        if self._error is not None and not self.is_over:
            raise _Aborted
        if not self.controls_this_thread():
            # After the end of the program, or code that runs while a thread is freed: nobody else runs.
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
            ended.real_join(PATIENCE)  # it frees its local variables, which may be steps
        me.pending = None
        if me.outcome == FAIL:
            raise InjectedError(self.events[-1])
        if me.outcome == INTERRUPT:
            raise KeyboardInterrupt
        return me.outcome

    def _switched(self, me: Task) -> bool:
        """Choose who goes on, and let it. Return False if it is ``me``."""
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
        return True  # not compared with ``self.current``, which the other thread may have changed again

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
        """What can happen next, first the default: ``me`` goes on, or the oldest thread that can."""
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
        # Not the name of the thread, which may contain the number of threads of the process.
        task = Task(len(self.tasks), f"thread {len(self.tasks)}")
        task.thread = thread
        task.pending = Operation("begin", _always)
        self.tasks.append(task)
        return task

    def run_task(self, task: Task, work: Callable[[], None]) -> None:
        """Run ``work`` on its own thread, when it is its turn."""
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
        """Return what ``program`` returns, after all its threads have ended.

        Raises:
            DeadlockError: no thread could go on, a thread is left, or one was ended by an exception.
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
        """Let other threads go on until they end."""
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
    """The stack of each thread that has not ended, without the frames of the scheduler."""
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

"""Locks, queues and threads that wait in the scheduler that was active when they were created."""

from __future__ import annotations

import concurrent.futures._base
import concurrent.futures.thread
import importlib.util
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import ReferenceType

from .scheduler import GO, INTERRUPT_AFTER, TIMEOUT, Scheduler

active: list[Scheduler] = []
"""The scheduler in use, if any."""


class _Scheduled:
    def __init__(self) -> None:
        self._scheduler = active[-1]
        self._scheduler.objects.append(self)
        self._name = f"{type(self).__name__}"

    def _wait(
        self, what: str, ready: Callable[[], bool], take: Callable[[], Any], timeout: float | None, *, call: bool = True
    ) -> tuple[bool, Any]:
        """Wait until ``ready``, then ``take``. Return whether it was ready in time, and the result of ``take``."""
        if timeout is not None and timeout <= 0:
            self._scheduler.step(f"{self._name}.{what} at once", call=call)
            return (True, take()) if ready() else (False, None)
        outcome = self._scheduler.step(f"{self._name}.{what}", ready, timed=timeout is not None, call=call)
        if outcome == TIMEOUT:
            return False, None
        found = take()
        if outcome == INTERRUPT_AFTER:
            raise KeyboardInterrupt
        return True, found

    def _woke(self, what: str) -> None:
        self._scheduler.step(f"after {self._name}.{what}")


def _seconds(blocking: bool, timeout: float | None) -> float | None:
    return 0 if not blocking else None if timeout in (None, -1) else timeout


class Lock(_Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._acquire(_seconds(blocking, timeout), call=True)

    def _acquire(self, timeout: float | None, *, call: bool) -> bool:
        def take() -> None:
            self._is_held = True

        return self._wait("acquire", lambda: not self._is_held, take, timeout, call=call)[0]

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        self._woke("release")

    def locked(self) -> bool:
        return self._is_held

    is_held = locked

    def __enter__(self) -> bool:
        return self._acquire(None, call=False)

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(_Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self._owner, self._count = 0, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._acquire(_seconds(blocking, timeout), call=True)

    def _acquire(self, timeout: float | None, *, call: bool) -> bool:
        me = threading.get_ident()
        if self._owner == me:
            self._count += 1
            return True

        def take() -> None:
            self._owner, self._count = me, 1

        return self._wait("acquire", lambda: not self._count, take, timeout, call=call)[0]

    def release(self) -> None:
        if self._owner != threading.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = 0
            self._woke("release")

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def is_held(self) -> bool:
        """Return whether any thread holds the lock."""
        return bool(self._count)

    def __enter__(self) -> bool:
        return self._acquire(None, call=False)

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition(_Scheduled):
    def __init__(self, lock: Any = None) -> None:
        super().__init__()
        self._lock = RLock() if lock is None else lock
        self._waiters: list[list[bool]] = []

    def acquire(self, *arguments: Any) -> bool:
        return bool(self._lock.acquire(*arguments))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        if isinstance(self._lock, RLock) and not self._lock._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        woken = [False]
        self._waiters.append(woken)
        depth, self._lock._count = self._lock._count if isinstance(self._lock, RLock) else 1, 1
        self._lock.release()
        try:
            return self._wait("wait", lambda: woken[0], lambda: None, timeout)[0]
        finally:
            if woken in self._waiters:
                self._waiters.remove(woken)
            self._lock.acquire()
            if isinstance(self._lock, RLock):
                self._lock._count = depth

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        while not (result := predicate()):
            if not self.wait(timeout):
                return predicate()
        return result

    def notify(self, n: int = 1) -> None:
        if isinstance(self._lock, RLock) and not self._lock._is_owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        for woken in self._waiters[:n]:
            woken[0] = True
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Semaphore(_Scheduled):
    def __init__(self, value: int = 1) -> None:
        super().__init__()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        def take() -> None:
            self._value -= 1

        return self._wait("acquire", lambda: self._value > 0, take, _seconds(blocking, timeout))[0]

    def release(self, n: int = 1) -> None:
        self._value += n
        self._woke("release")

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


class Event(_Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def is_set(self) -> bool:
        self._scheduler.step(f"{self._name}.is_set")
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._woke("set")

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._wait("wait", lambda: self._is_set, lambda: None, timeout)[0]


class SimpleQueue(_Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self._items: deque[Any] = deque()

    def __class_getitem__(cls, item: Any) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if not isinstance(item, ReferenceType):  # one is put when an object is freed, where no signal can be raised
            self._woke("put")

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        ready, item = self._wait("get", lambda: bool(self._items), self._items.popleft, _seconds(block, timeout))
        if not ready:
            raise queue.Empty
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Thread(threading.Thread):
    # is_forgotten: whether Python counts the thread as ended although it may still run.

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._scheduler, self._task = active[-1], None
        self._scheduler.objects.append(self)
        self._number = len(self._scheduler.objects)
        self.is_forgotten = False
        super().__init__(*arguments, **options)
        self.daemon = True  # an aborted program must not keep the interpreter alive

    def __hash__(self) -> int:
        return self._number  # unlike the address, it gives sets the same order in each run

    def start(self) -> None:
        self._task = self._scheduler.new_task(self)
        super().start()
        self._scheduler.step(f"after start of {self._task.name}")

    def run(self) -> None:
        self._scheduler.run_task(self._task, super().run)

    def is_alive(self) -> bool:
        if self._task is None:
            return False
        self._scheduler.step(f"is {self._task.name} alive")
        return not self._task.is_done and not self.is_forgotten

    def join(self, timeout: float | None = None) -> None:
        if self._task is None:
            raise RuntimeError("cannot join thread before it is started")
        if threading.current_thread() is self:
            raise RuntimeError("cannot join current thread")
        if self.is_forgotten or not self._scheduler.controls_this_thread():
            return
        try:
            outcome = self._scheduler.step(
                f"join {self._task.name}", lambda: self._task.is_done, timed=timeout is not None, call=True
            )
        except KeyboardInterrupt:
            # Before Python 3.13, the thread then counts as ended, and the next join returns although it still runs.
            self.is_forgotten = sys.version_info < (3, 13)
            raise
        if outcome == INTERRUPT_AFTER:
            raise KeyboardInterrupt

    def real_join(self, timeout: float) -> None:
        if self.ident is not None:
            super().join(timeout)


def _executors() -> tuple[Any, Any]:
    """Return the standard library's thread pool and future, built on the objects of this module."""
    base = _copy_of(concurrent.futures._base)
    base.threading = _Threading(threading)
    pools = _copy_of(concurrent.futures.thread)
    pools.threading, pools._base = _Threading(threading), base
    pools.queue = _Queue(queue)
    # A pool holds this lock while it starts a thread. Apart from that, only the exit of the interpreter holds it.
    pools._global_shutdown_lock = _Nothing()
    return pools.ThreadPoolExecutor, base.Future


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _Replaced:
    """A module with some names replaced."""

    names: tuple[str, ...]

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return globals()[name] if name in self.names else getattr(self._module, name)


class _Threading(_Replaced):
    names = ("Lock", "RLock", "Condition", "Semaphore", "Event", "Thread")


class _Queue(_Replaced):
    names = ("SimpleQueue",)


def _copy_of(module: ModuleType) -> Any:
    assert module.__spec__ is not None
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"scheduled_{module.__name__.rpartition('.')[2]}", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    copy.__package__ = module.__package__
    spec.loader.exec_module(copy)
    return copy


ThreadPoolExecutor, Future = _executors()
CLASSES = {
    each.__name__: each
    for each in (Condition, Event, Lock, RLock, Semaphore, SimpleQueue, Thread, ThreadPoolExecutor, Future)
}
__all__ = ["CLASSES", "GO", "active"]

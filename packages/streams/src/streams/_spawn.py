"""Run one worker thread per device for the duration of a ``with`` block."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import current_thread
from types import TracebackType

from . import _waiting as waiting
from ._context import Context
from ._device import Device, check, normalise
from ._exit import watched
from ._task import InQueue, OutQueue
from ._use import use_device
from ._worker import serve

Queues = tuple[list[InQueue], list[OutQueue]]


class _Worker:
    """A worker thread with its queues. ``ended`` is set after its last task."""

    def __init__(self, device: Device, context: Context, block: "_WorkerBlock") -> None:
        self.in_queue: InQueue = waiting.SimpleQueue()
        self.out_queue: OutQueue = waiting.SimpleQueue()
        self.ended = waiting.Event()
        # If the block is freed without being left, this reference is put into the queue, and ends the worker. No Python
        # code runs, which a signal could interrupt, and nothing waits, as this may happen on any thread. The thread
        # keeps the reference: if it were freed together with the block, its callback would not be called.
        freed = weakref.ref(block, self.in_queue.put)  # type: ignore[arg-type]
        blocks = [partial(nullcontext, freed), partial(watched, self.in_queue, self.ended)]
        blocks += [context.applied, partial(use_device, device)]
        # A daemon thread, because the interpreter waits for non-daemon threads before it exits.
        self.thread = waiting.Thread(
            target=serve, args=(self.in_queue, self.out_queue, *blocks), name=f"worker of {device}", daemon=True
        )


def spawn_workers(
    devices: Iterable[Device], shared: bool = True, *, context: Context | None = None
) -> AbstractContextManager[Queues]:
    """Start one worker thread per device for the duration of a ``with`` block.

    The context manager yields ``(in_queues, out_queues)``, two lists with one queue per entry of ``devices``. Workers
    have the settings of the thread that enters the block (:class:`Context`). When the block exits, even with an
    exception, the workers finish all queued tasks and are joined. A KeyboardInterrupt during this wait is raised after
    it, and a second one aborts the wait. In a process that is forked inside the block the workers do not exist; it can
    only exit the block, which puts ``(False, None)`` into every out-queue.

    Args:
        devices: hashable objects with ``type`` and ``index``. Equal devices share a worker and its queues; ``cuda`` is
            the current GPU, and ``cpu:k`` the CPU.
        shared: if False, every entry has its own worker.
        context: the settings of the workers; by default the caller's settings.

    Returns:
        A context manager, which may be entered again after it has exited.

    Raises:
        TypeError: an entry of ``devices`` is not a device.
        ValueError: this machine does not have one of ``devices``.
        RuntimeError: on entry, if the block is active already, or a ``torch.func`` transform is.

    >>> import torch
    >>> from streams import CPUStream, Task
    >>> with spawn_workers([torch.device("cpu")]) as ([in_queue], [out_queue]):
    ...     in_queue.put(Task(CPUStream, compute=lambda: 6 * 7))
    ...     ok, (task, result) = out_queue.get()
    >>> ok, result
    (True, 42)
    """
    devices = list(devices)
    for j, device in enumerate(devices):
        check(device, f"devices[{j}]")
    return _WorkerBlock([normalise(device) for device in devices], shared, context)


class _WorkerBlock(AbstractContextManager[Queues]):
    """The context manager; not a generator, because the garbage collector could close one, and wait, on any thread."""

    def __init__(self, devices: Sequence[Device], shared: bool, context: Context | None) -> None:
        self._devices = devices
        self._shared = shared
        self._context = context
        self._workers: list[_Worker] = []

    def __enter__(self) -> Queues:
        if self._workers:
            raise RuntimeError(
                "this block of workers is entered already; leave it first, or create a second one with "
                "spawn_workers(...)"
            )
        context = self._context or Context.capture()
        by_device: dict[Device, _Worker] = {}
        pairs = []
        try:
            for device in self._devices:
                if device not in by_device or not self._shared:
                    by_device[device] = self._start(device, context)
                pairs.append(by_device[device])
        except BaseException:
            self._end_all()
            raise
        return [each.in_queue for each in pairs], [each.out_queue for each in pairs]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end_all()
        except BaseException:
            # After an interrupt, end all workers before raising it.
            self._end_all()
            raise

    def _start(self, device: Device, context: Context) -> _Worker:
        each = _Worker(device, context, self)
        self._workers.append(each)
        each.thread.start()
        return each

    def _end_all(self) -> None:
        for each in self._workers:
            each.in_queue.put(None)
        for each in self._workers:
            if each.thread is current_thread():
                continue  # a worker may leave its own block, but cannot join itself
            if each.thread.is_alive():
                # Before Python 3.13, a join that follows an interrupted join returns although the thread still runs.
                each.ended.wait()
                each.thread.join()
            elif not each.ended.is_set():
                # The thread could not start, or this is a forked process, where it does not exist.
                each.out_queue.put((False, None))
        self._workers.clear()

"""Worker threads for the length of a ``with`` block, one for each device."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from types import TracebackType

from ._context import Context
from ._device import Device, check, normalise
from ._exit import watched
from ._task import InQueue, OutQueue
from ._use import use_device
from ._worker import serve

Queues = tuple[list[InQueue], list[OutQueue]]


class _Worker(Thread):
    """A worker with its queues. ``ended`` is set when it has done its last task."""

    def __init__(self, device: Device, context: Context) -> None:
        self.in_queue: InQueue = SimpleQueue()
        self.out_queue: OutQueue = SimpleQueue()
        self.ended = Event()
        blocks = partial(watched, self.in_queue, self.ended), context.applied, partial(use_device, device)
        # A daemon thread, since the interpreter waits for other threads before its exit.
        super().__init__(
            target=serve, args=(self.in_queue, self.out_queue, *blocks), name=f"worker of {device}", daemon=True
        )


def spawn_workers(
    devices: Iterable[Device], shared: bool = True, *, context: Context | None = None
) -> AbstractContextManager[Queues]:
    """A context manager that starts a worker for each device, and ends them.

    It yields ``(in_queues, out_queues)``, with one queue of each kind for each of ``devices``. Workers have the
    settings of the thread that enters the block (:class:`Context`). When the block is left, also by an exception,
    workers finish the tasks that are queued, and all are joined. A KeyboardInterrupt during that wait is raised after
    it; a second one stops the wait. A process that is forked inside the block has no workers, and can leave the block
    only: then each out-queue says that its worker has ended.

    Args:
        devices: objects that are hashable and have ``type`` and ``index``. Equal devices share a worker and its queues;
            ``cuda`` is the current GPU, and ``cpu:k`` the CPU.
        shared: if False, each entry has a worker of its own.
        context: the settings of the workers, instead of the caller's.

    Returns:
        A context manager, which may be entered again after it was left.

    Raises:
        TypeError, ValueError: an entry of ``devices`` is not a device, or one that this machine does not have.

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
    """The context manager. Not a generator, which the garbage collector could close, and so wait, on any thread."""

    def __init__(self, devices: Sequence[Device], shared: bool, context: Context | None) -> None:
        self._devices = devices
        self._shared = shared
        self._context = context
        self._workers: list[_Worker] = []

    def __enter__(self) -> Queues:
        if self._workers:
            raise RuntimeError(
                "this block of workers is entered already, and its queues belong to whoever did; leave it first, or "
                "make another one with spawn_workers(...)"
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
            # Interrupted: end all workers again, and then let the interrupt be raised.
            self._end_all()
            raise

    def __del__(self) -> None:
        # Freed without being left: end the workers, but do not wait, since this may run on any thread.
        for each in vars(self).get("_workers", ()):  # none if an interrupt came before the end of __init__
            each.in_queue.put(None)

    def _start(self, device: Device, context: Context) -> _Worker:
        each = _Worker(device, context)
        self._workers.append(each)
        each.start()
        return each

    def _end_all(self) -> None:
        for each in self._workers:
            each.in_queue.put(None)
        for each in self._workers:
            if each is current_thread():
                continue  # a worker may leave the block that it belongs to
            if each.is_alive():
                # Before Python 3.13, join after an interrupted join returns although the thread still runs.
                each.ended.wait()
                each.join()
            elif not each.ended.is_set():
                # It could not start, or this is a forked process, in which other threads do not exist.
                each.out_queue.put((False, None))
        self._workers.clear()

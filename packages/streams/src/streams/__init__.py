"""A device-independent stream API, and worker threads that inherit their caller's settings."""

from . import _waiting as waiting
from ._context import Context
from ._device import has_streams
from ._dispatch import DispatchMode
from ._notes import add_note
from ._order import AbstractEvent, record_event, record_stream, wait_event, wait_stream
from ._spawn import spawn_workers
from ._stream import (
    AbstractStream,
    CPUStream,
    CPUStreamType,
    as_cuda,
    current_stream,
    default_stream,
    get_device,
    is_accelerator,
    is_cuda,
    new_stream,
)
from ._task import ExcInfo, InQueue, OutQueue, Task
from ._threads import limit_threads, pause_helpers
from ._use import use_device, use_stream
from ._worker import worker

__all__ = [
    "AbstractEvent",
    "AbstractStream",
    "CPUStream",
    "CPUStreamType",
    "Context",
    "DispatchMode",
    "ExcInfo",
    "InQueue",
    "OutQueue",
    "Task",
    "add_note",
    "as_cuda",
    "current_stream",
    "default_stream",
    "get_device",
    "has_streams",
    "is_accelerator",
    "is_cuda",
    "limit_threads",
    "new_stream",
    "pause_helpers",
    "record_event",
    "record_stream",
    "spawn_workers",
    "use_device",
    "use_stream",
    "wait_event",
    "wait_stream",
    "waiting",
    "worker",
]
__version__ = "0.1.0"

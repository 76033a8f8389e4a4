"""One interface for the streams of accelerators and the CPU, and worker threads with their caller's settings."""

from ._accelerator import has_streams as has_streams
from ._context import Context as Context
from ._dispatch import DispatchMode as DispatchMode
from ._event import AbstractEvent as AbstractEvent
from ._event import record_event as record_event
from ._event import wait_event as wait_event
from ._idle import pause_helpers as pause_helpers
from ._memory import keep_memory as keep_memory
from ._notes import add_note as add_note
from ._record import record_stream as record_stream
from ._spawn import spawn_workers as spawn_workers
from ._stream import AbstractStream as AbstractStream
from ._stream import CPUStream as CPUStream
from ._stream import CPUStreamType as CPUStreamType
from ._stream import as_accelerator as as_accelerator
from ._stream import as_cuda as as_cuda
from ._stream import current_stream as current_stream
from ._stream import default_stream as default_stream
from ._stream import get_device as get_device
from ._stream import is_accelerator as is_accelerator
from ._stream import is_cuda as is_cuda
from ._stream import new_stream as new_stream
from ._submit import submit as submit
from ._task import ExcInfo as ExcInfo
from ._task import InQueue as InQueue
from ._task import OutQueue as OutQueue
from ._task import Task as Task
from ._threads import limit_threads as limit_threads
from ._use import use_device as use_device
from ._use import use_stream as use_stream
from ._wait import wait_stream as wait_stream
from ._worker import worker as worker

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
    "as_accelerator",
    "as_cuda",
    "current_stream",
    "default_stream",
    "get_device",
    "has_streams",
    "is_accelerator",
    "is_cuda",
    "keep_memory",
    "limit_threads",
    "new_stream",
    "pause_helpers",
    "record_event",
    "record_stream",
    "spawn_workers",
    "submit",
    "use_device",
    "use_stream",
    "wait_event",
    "wait_stream",
    "worker",
]
__version__ = "0.1.0"

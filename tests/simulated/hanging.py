"""A test that hangs, for test_accelerator.py alone to run: no other session looks into this file."""

from __future__ import annotations

from threading import Event

from streams import CPUStream, Task, spawn_workers

from .accelerator import device


def wait_for_ever() -> None:
    Event().wait()


def test_hangs():
    with spawn_workers([device(0)]) as ([in_queue], [out_queue]):
        in_queue.put(Task(CPUStream, compute=wait_for_ever))
        out_queue.get()

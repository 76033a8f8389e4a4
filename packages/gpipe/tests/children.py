"""Forks of the process that runs the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> str:
    """What ``work`` returns, or the error that it raises, in a fork of this process; one that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may have a time limit of its own
            signal.alarm(25)
            os.write(writer, _answer(work).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        answer = told.read()
    status = os.waitpid(child, 0)[1]
    return answer if status == 0 else f"the child ended with status {status}"


def _answer(work: Callable[[], object]) -> str:
    try:
        return str(work())
    except BaseException as error:
        return repr(error)

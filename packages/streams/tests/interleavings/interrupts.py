"""KeyboardInterrupt wherever the interpreter may raise one, in the files under test.

The interpreter checks for signals after a call, when a function or generator starts or continues, and at the end of a
loop's body, but not between other instructions. In particular, nothing can be raised between the body of ``with lock:``
and the release of the lock, or between the acquisition and the body. A trace function may raise before any line, even
before the release, and then leaves the lock locked, which no signal does. For the same reason, places are left out if
the next instruction has a different exception handler.
"""

from __future__ import annotations

import dis
import opcode
import sys
from collections.abc import Callable, Collection
from functools import cache
from types import CodeType, FrameType
from typing import Any

_NAMES = "RESUME JUMP_BACKWARD JUMP_ABSOLUTE CALL CALL_KW CALL_FUNCTION CALL_METHOD CALL_FUNCTION_KW CALL_FUNCTION_EX"
CHECKING = frozenset(opcode.opmap[name] for name in _NAMES.split() if name in opcode.opmap)
"""After these instructions, the interpreter checks for signals (``CHECK_EVAL_BREAKER`` in CPython's ceval.c)."""

Place = tuple[CodeType, int]
"""An instruction."""


def interrupt() -> None:
    raise KeyboardInterrupt


class Interrupts:
    """Raise KeyboardInterrupt in this thread at one or several of the places where a signal may arrive.

    Args:
        files: path prefixes of the files under test.
        at: the numbers of the places, each counted from 1 after the previous interrupt; 0 for none.
        act: called at these places. By default, it raises KeyboardInterrupt.

    Attributes:
        count: the number of places since the last interrupt.
        places: the places after all interrupts.
        interrupts: the places of the interrupts.
        error: the KeyboardInterrupt that left ``work``, with its traceback. As in an interactive session, the frames
            live as long as it does.
    """

    def __init__(self, files: Collection[str], *at: int, act: Callable[[], object] = interrupt) -> None:
        self._files, self._at, self._act = tuple(files), [each for each in at if each], act
        self.count = 0
        self.interrupts: list[Place] = []
        self.places: list[Place] = []
        self.error: KeyboardInterrupt | None = None
        self._interrupted: list[tuple[FrameType, _Traced]] = []

    def during(self, work: Callable[[], object]) -> bool:
        """Call ``work``, and return whether it was interrupted."""
        before, profile = sys.gettrace(), sys.getprofile()
        sys.settrace(self._begin)
        try:
            work()
        except KeyboardInterrupt as error:
            sys.settrace(before)
            assert self.interrupts  # otherwise the test itself was interrupted
            self.error = error
            return True
        finally:
            sys.settrace(before)
            sys.setprofile(profile)
            self._interrupted.clear()
        return False

    def _begin(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return _Traced(frame, self._arrive)

    def _arrive(self, frame: FrameType, traced: _Traced) -> None:
        self.count += 1
        if not self._at:
            self.places.append((frame.f_code, frame.f_lasti))
        elif self.count == self._at[0]:
            del self._at[0]
            self.count = 0
            self.interrupts.append((frame.f_code, frame.f_lasti))
            try:
                self._act()
            except BaseException:
                self._interrupted.append((frame, traced))
                sys.setprofile(self._go_on)
                raise

    def _go_on(self, frame: FrameType, event: str, _: Any) -> None:
        """Restore the trace function, because the interpreter removes one that raises."""
        sys.setprofile(None)
        interrupted, traced = self._interrupted.pop()
        traced.previous = -1
        interrupted.f_trace = traced
        sys.settrace(self._begin)


class _Traced:
    """The trace function of a frame, which calls ``arrive`` at each place where a signal may arrive."""

    def __init__(self, frame: FrameType, arrive: Callable[[FrameType, _Traced], None]) -> None:
        self._code, self._arrive = code_of(frame.f_code), arrive
        self.previous = -1

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            before, self.previous = self.previous, frame.f_lasti
            # The exception of a signal belongs to the instruction that checked for it, but this one to the next.
            is_same = before >= 0 and handler(frame.f_code, before) == handler(frame.f_code, frame.f_lasti)
            if is_same and self._code[before] in CHECKING:
                self._arrive(frame, self)
        elif event == "exception":
            self.previous = -1  # no check for signals follows an instruction that raises
        return self


@cache
def code_of(code: CodeType) -> bytes:
    return code.co_code


@cache
def handler(code: CodeType, offset: int) -> int | None:
    """Return the offset of an instruction's exception handler; None if it has none, or before Python 3.11."""
    if not hasattr(code, "co_exceptiontable"):
        return None
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((each.target for each in entries if each.start <= offset < each.end), None)


def representatives(places: Collection[Place]) -> list[int]:
    """Return the numbers of the places where each instruction is reached for the first and the last time."""
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    for number, place in enumerate(places, start=1):
        first.setdefault(place, number)
        last[place] = number
    return sorted({*first.values(), *last.values()})

"""Races reported by the simulated accelerator, with the Python line that caused them."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Race(NamedTuple):
    """Two accesses that nothing orders, or memory that was freed too early.

    Attributes:
        text: such as ``READ by mm on dev0/s3 not ordered after copy H2D on dev0/s1``.
        line: the line that launched the later access.
    """

    text: str
    line: str

    def __str__(self) -> str:
        return f"{self.text}\n    at {self.line}"


class Races:
    """The distinct races since the last :meth:`take`.

    Threads of the simulated device call it, even while memory is being freed, so it must not raise.
    """

    def __init__(self) -> None:
        self._found: dict[Race, None] = {}

    def __call__(self, text: str) -> None:
        self._found[Race(text, line_of_caller())] = None

    def take(self) -> list[Race]:
        """Return all races, and clear them."""
        found, self._found = self._found, {}
        return list(found)


def line_of_caller() -> str:
    """Return this thread's innermost line of this repository, outside the simulator. Autograd threads have none."""
    for frame in _frames(sys._getframe(1)):
        code = frame.f_code
        if _is_ours(Path(code.co_filename)):
            return f"{Path(code.co_filename).relative_to(ROOT)}:{frame.f_lineno} in {code.co_name}"
    return f"no line of Python, but a thread of torch, seen as {threading.current_thread().name}"


def _is_ours(file: Path) -> bool:
    simulator = file.parent == HERE and not file.name.startswith("test_")
    return any(file.is_relative_to(ROOT / folder) for folder in ("packages", "tests")) and not simulator


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back

"""What a caller asks of the runs that begin in a block; workers see it too, also in a recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..schedule import Action
from ..transport._link import Link

if TYPE_CHECKING:
    from ._stage_runner import StageRunner


class RunObserver(Protocol):
    """Does the actions of one run, with an eye on something.

    Attributes:
        link: the class of its links, whose readers may want to be told what arrives.
    """

    link: type[Link[Any]]

    def do(self, runner: StageRunner, action: Action) -> None:
        """Let ``runner`` do ``action``."""

    def told(self, since: float) -> list[list[Any]]:
        """What there is to tell other processes of this run, which JSON can write.

        Args:
            since: a moment by this process's clock; the others have one of their own that is the same moment.
        """

    def hear(self, told: list[list[Any]], since: float) -> None:
        """What another process has told."""


class Observer(Protocol):
    """Wants to know of every run."""

    def begin(self, placement: Sequence[int]) -> RunObserver:
        """A run begins, whose stage j is on worker ``placement[j]``."""


class Settings(NamedTuple):
    """What holds where a run begins.

    Attributes:
        inline: whether to walk on the calling thread.
        observer: wants to know of the run.
        ending: of a model that computes its own loss: asks the last layer for what that needs, instead of the output.
    """

    inline: bool = False
    observer: Observer | None = None
    ending: object = None


_settings: ContextVar[Settings] = ContextVar("gpipe.settings", default=Settings())  # noqa: B039 — it cannot change

settings = _settings.get
"""What holds for a run that begins here and now."""


@contextmanager
def with_settings(**changes: Any) -> Iterator[None]:
    """Inside, runs begin with these settings in place of others."""
    token = _settings.set(_settings.get()._replace(**changes))
    try:
        yield
    finally:
        _settings.reset(token)


@contextmanager
def inline() -> Iterator[None]:
    """Inside this context, every pipe runs the same programs on the calling thread, in an order in which nothing waits.

    Use it for ``breakpoint()`` in a layer, for profilers that see only one thread, and for tests that need a fixed
    order of events. A backward runs inline if its forward did.

    Returns:
        A context manager.

    >>> with inline():
    ...     settings().inline
    True
    """
    with with_settings(inline=True):
        yield

"""Settings for the runs that begin inside a ``with`` block, in the same thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..schedule import Action
from ..values._leaves import Activation
from ._stage import Stage


class RunObserver(Protocol):
    """Observes the actions of one run, on the threads that take them."""

    def observing(self, stage: Stage, action: Action, /) -> AbstractContextManager[None]:
        """Return the context in which a stage takes ``action``."""

    def got(self, payload: Activation | list[Tensor | None], *, moved: bool) -> None:
        """Observe, inside such a context, that a value or gradients have arrived from another stage.

        Args:
            moved: whether they were sent by a different device or process.
        """

    def export_events(self, since: float) -> list[list[Any]]:
        """Return the events recorded since ``since``, a time of this process's clock, as JSON-compatible data."""

    def import_events(self, events: list[list[Any]], since: float) -> None:
        """Add events exported by another process."""


class Observer(Protocol):
    """Observes every run."""

    def begin(self, placement: Sequence[int]) -> RunObserver:
        """Observe a run whose stage j is on worker ``placement[j]``."""


class Settings(NamedTuple):
    """Settings of a run when it begins.

    Attributes:
        inline: whether the calling thread computes all stages.
        observer: observes the run.
    """

    inline: bool = False
    observer: Observer | None = None


_settings: ContextVar[Settings] = ContextVar("gpipe.settings", default=Settings())  # noqa: B039 — it cannot change

settings = _settings.get
"""Return the settings for a run that begins now in this thread."""


@contextmanager
def with_settings(**changes: Any) -> Iterator[None]:
    before = _settings.get()
    try:
        _settings.set(before._replace(**changes))
        yield
    finally:
        _settings.set(before)


@contextmanager
def inline() -> Iterator[None]:
    """Run every pipe on the calling thread: the same steps, in an order in which none has to wait.

    Use it for ``breakpoint()`` in a layer, for profilers that trace only one thread, and for tests that need a fixed
    order. A backward runs inline if its forward did.

    Returns:
        A context manager.

    >>> with inline():
    ...     settings().inline
    True
    """
    with with_settings(inline=True):
        yield

""":class:`Timeline`: the events of a run, shown as a table, a picture, a page or a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from os import PathLike

from .._forks import fork_lock
from .._page import fragment, page, save
from ._chrome import trace
from ._events import Event
from ._svg import svg
from ._table import table

_reading = fork_lock()


class Timeline:
    """The actions of a run: recorded by :func:`gpipe.record`, or predicted by :func:`gpipe.simulate.simulate`.

    ``str()`` returns a table with one line per worker; :meth:`save` writes a picture, a page or a trace.

    Args:
        events: the initial actions.
        workers: the worker of each stage. By default the worker has the index of its stage.

    >>> timeline = Timeline([Event(j, 0, "forward", device="cpu", start=j, end=j + 1) for j in range(2)])
    >>> timeline.makespan, timeline.bubble
    (2, 0.5)
    """

    workers: dict[int, int]

    def __init__(self, events: Iterable[Event] = (), workers: Mapping[int, int] | None = None) -> None:
        self.workers = dict(workers or {})
        self._events: tuple[Event, ...] = ()
        self._added: deque[Event | Callable[[], Event]] = deque(events)

    def add(self, event: Event | Callable[[], Event]) -> None:
        """Add an action. This method is thread-safe.

        Args:
            event: the action, or a function that returns it. The function is called when the timeline is read, because
                times on a GPU are known only after its work.
        """
        self._added.append(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """All actions, sorted by their start."""
        with _reading:
            # Remove nothing until all are read, so that nothing is lost if a function raises.
            settled = [each() if callable(each) else each for each in tuple(self._added)]
            for _ in settled:
                self._added.popleft()
            if settled:
                self._events = tuple(sorted((*self._events, *settled), key=lambda event: (event.start, event.stage)))
            return self._events

    @property
    def lanes(self) -> dict[int, tuple[Event, ...]]:
        """The actions of each worker, sorted by their start."""
        lanes: dict[int, list[Event]] = {}
        for event in self.events:
            lanes.setdefault(self.workers.get(event.stage, event.stage), []).append(event)
        return {worker: tuple(lanes[worker]) for worker in sorted(lanes)}

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max((event.stage for event in self.events), default=-1)

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return 1 + max((event.microbatch for event in self.events if not event.moves), default=-1)

    @property
    def start(self) -> float:
        """The start of the first action."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def end(self) -> float:
        """The end of the last action."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """The seconds from the first start to the last end."""
        return self.end - self.start

    @property
    def utilization(self) -> dict[int, float]:
        """The fraction of the makespan that each worker computes. Transfers from and to the host do not count."""
        # An empty run counts as busy, and rounded sums may exceed the makespan.
        whole = self.makespan
        computed = {worker: [each for each in lane if not each.moves] for worker, lane in self.lanes.items()}
        return {worker: min(1.0, _compute_covered(lane) / whole) if whole else 1.0 for worker, lane in computed.items()}

    @property
    def bubble(self) -> float:
        """The idle fraction of the workers' time, between the first start and the last end."""
        # Each worker has the same weight, however many stages it has.
        shares = self.utilization.values()
        return 1 - sum(shares) / len(shares) if shares else 0.0

    def held(self, *stages: int) -> list[tuple[float, int]]:
        """Return the total bytes of activations that these stages hold, over time.

        Args:
            stages: the indices of the stages.

        Returns:
            Pairs (time, bytes from then on), sorted by time; empty if unknown.
        """
        # Stages peak at different times, so the latest value of each stage counts until its next.
        bytes_of: dict[int, int] = {}
        steps = []
        for event in sorted(self.events, key=lambda e: e.end):
            if event.stage in stages and event.held_bytes is not None:
                bytes_of[event.stage] = event.held_bytes
                steps.append((event.end, sum(bytes_of.values())))
        return steps

    @property
    def peak_bytes(self) -> dict[int, int] | None:
        """The peak bytes of activations that each stage holds; None if unknown."""
        held = {j: self.held(j) for j in sorted({event.stage for event in self.events})}
        if not any(held.values()):
            return None
        return {j: max((size for _, size in steps), default=0) for j, steps in held.items()}

    def save(
        self, path: str | PathLike[str], *, title: str = "", compare_with: Mapping[str, Timeline] | None = None
    ) -> None:
        """Write the timeline to a file, in the format of the suffix of ``path``.

        ===========  ==============================================================
        ``.svg``     a picture; browsers show the details of a cell as a tooltip
        ``.html``    a page with the table and the picture
        ``.json``    a trace for https://ui.perfetto.dev and chrome://tracing
        ===========  ==============================================================

        Args:
            path: the file.
            title: a title above the picture.
            compare_with: more timelines by title, drawn below on the same scale (pictures and pages only).

        Raises:
            ValueError: ``path`` has a different suffix, or ``.json`` together with ``compare_with``.
        """
        panels = [(title, self), *(compare_with or {}).items()]
        tables = "\n\n".join(filter(None, (text for name, each in panels for text in (name, str(each)))))
        forms: dict[str, Callable[[], str]] = {
            ".svg": lambda: svg(panels),
            ".html": lambda: page(title or "timeline", tables, svg(panels)),
        }
        save(path, forms if compare_with else {**forms, ".json": lambda: trace(self, title)})

    def __str__(self) -> str:
        return table(self)

    def __len__(self) -> int:
        return len(self._events) + len(self._added)

    def __repr__(self) -> str:
        # Omit times, because they may wait for the device, and debuggers call this at any moment.
        return f"<{type(self).__name__} of {len(self)} actions>"

    def _repr_html_(self) -> str:
        # Notebooks show SVG as an image, without tooltips.
        return fragment("", svg([("", self)]))


def _compute_covered(lane: Iterable[Event]) -> float:
    """Return the seconds that at least one of the events covers; they must be sorted by start."""
    total, reach = 0.0, float("-inf")
    for event in lane:
        total += max(0.0, event.end - max(event.start, reach))
        reach = max(reach, event.end)
    return total

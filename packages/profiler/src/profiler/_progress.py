"""A progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(wanted: bool, timeout: float) -> Iterator[Callable[[float], None]]:
    """Yields a function to call with the seconds spent so far; it shows nothing unless `wanted` and on a terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda spent: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Without a refreshing thread, which would take time from the layers.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("profiling", total=timeout)

        def spend(spent: float) -> None:
            bar.update(task, completed=min(spent, timeout), refresh=True)

        yield spend

"""A table is data: shown on the terminal, or written into a page between its two markers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from tabulate import tabulate

PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"


@dataclass
class Table:
    """Rows of text under headings. Its place is `<!-- begin: name -->` … `<!-- end: name -->` in docs/benchmarks/page.

    `left` counts the leading columns that hold words; the others hold numbers. `notes` are printed below.
    """

    page: str
    name: str
    caption: str
    headings: tuple[str, ...]
    left: int = 1
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])

    def note(self, text: str) -> str:
        """The mark of a note on this table, for a cell; the same note has the same mark."""
        if text not in self.notes:
            self.notes.append(text)
        return f"({self.notes.index(text) + 1})"


@dataclass
class Report:
    """What a part of the suite found: tables for people, and figures by name for the table of targets."""

    tables: list[Table] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def show(console: Console, table: Table) -> None:
    shown = RichTable()
    for k, heading in enumerate(table.headings):
        shown.add_column(heading, justify="left" if k < table.left else "right")
    for row in table.rows:
        shown.add_row(*row)
    console.print(f"\n{table.caption}", markup=False, highlight=False)
    console.print(shown)
    for k, note in enumerate(table.notes, start=1):
        console.print(f"({k}) {note}", markup=False, highlight=False)


def markdown(table: Table, stamp: str) -> str:
    sides = ["left" if k < table.left else "right" for k in range(len(table.headings))]
    body = tabulate(
        [list(map(_escaped, row)) for row in table.rows],
        headers=table.headings,
        tablefmt="pipe",
        colalign=sides if table.rows else None,
        disable_numparse=True,
    )
    notes = "\n".join(f"- ({k}) {_escaped(note)}" for k, note in enumerate(table.notes, start=1))
    return "\n\n".join(part for part in (f"{table.caption}", body, notes, f"*{stamp}*") if part)


def write(table: Table, stamp: str, pages: Path = PAGES) -> None:
    """Put `table` between its markers; what people wrote around them stays."""
    page = pages / table.page
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- begin: {table.name} -->", f"<!-- end: {table.name} -->"
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(place.findall(text)) != 1:
        raise ValueError(f"{page} must have one place for the table {table.name!r}: {begin} and, below it, {end}")
    block = f"{begin}\n\n{markdown(table, stamp)}\n\n{end}"
    page.write_text(place.sub(lambda _: block, text), encoding="utf-8")


def show_all(console: Console, tables: Iterable[Table]) -> None:
    for table in tables:
        show(console, table)


def _escaped(text: str) -> str:
    """A bar ends a cell, and an angle bracket may begin HTML, but for in code."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if k % 2 else part.replace("<", "&lt;") for k, part in enumerate(parts))

"""Results of a part: tables, shown or written into a page, and figures, stored for the table of targets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from tabulate import tabulate

PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"
RESULTS = Path(__file__).parent / "results"
Figures = dict[str, tuple[float, str]]  # {name: (value, stamp)}


@dataclass
class Table:
    """Rows of text under headings, written between `<!-- begin: name -->` and `<!-- end: name -->` in a page.

    Attributes:
        page: the file in docs/benchmarks.
        left: how many leading columns hold words; the others hold numbers.
        notes: footnotes, printed below.
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
        """Add a footnote, once, and return its mark for a cell."""
        if text not in self.notes:
            self.notes.append(text)
        return f"({self.notes.index(text) + 1})"


@dataclass
class Report:
    """Tables measured by a part of the suite, and figures by name."""

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
    """Replace what is between the table's markers; the text around them stays.

    Raises:
        ValueError: if the page does not have the two markers exactly once.
    """
    page = pages / table.page
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- begin: {table.name} -->", f"<!-- end: {table.name} -->"
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(between.findall(text)) != 1:
        raise ValueError(f"{page} must have the markers of the table {table.name!r} once: {begin} and, below it, {end}")
    block = f"{begin}\n\n{markdown(table, stamp)}\n\n{end}"
    page.write_text(between.sub(lambda _: block, text), encoding="utf-8")


def show_all(console: Console, tables: Iterable[Table]) -> None:
    for table in tables:
        show(console, table)


def keep(part: str, stamp: str, figures: dict[str, float], folder: Path = RESULTS) -> None:
    """Store figures with their stamp. Figures that this run did not measure are unchanged."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{part}.json"
    known = _read(file) if file.exists() else {}
    known.update((name, {"value": value, "stamp": stamp}) for name, value in figures.items())
    file.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def kept(folder: Path = RESULTS) -> Figures:
    """The figures of all parts, from the last run of each that was not `--quick`."""
    files = [_read(file) for file in sorted(folder.glob("*.json"))]
    return {name: (figure["value"], figure["stamp"]) for file in files for name, figure in file.items()}


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _escaped(text: str) -> str:
    # A bar would end the cell, and an angle bracket may begin HTML; neither does inside code.
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if k % 2 else part.replace("<", "&lt;") for k, part in enumerate(parts))

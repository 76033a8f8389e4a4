"""What parts have found, kept between runs for the table of targets: each figure with its own stamp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
Figures = dict[str, tuple[float, str]]  # value and stamp, by name


def keep(part: str, stamp: str, found: dict[str, float]) -> None:
    """Beside what this part found before: a run need not measure everything."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{part}.json"
    known = _read(file) if file.exists() else {}
    known.update((name, {"value": value, "stamp": stamp}) for name, value in found.items())
    file.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def kept() -> Figures:
    """Of all parts, from their last runs that were no smokes."""
    files = [_read(file) for file in sorted(FOLDER.glob("*.json"))]
    return {name: (figure["value"], figure["stamp"]) for file in files for name, figure in file.items()}


def _read(file: Path) -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return content

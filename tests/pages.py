"""The pages of the documentation as programs: what they show is run as it is printed."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"accelerate", "datasets", "lightning", "peft", "safetensors", "tokenizers", "transformers"}
"""What a page may import that only ``nox -s frameworks`` installs."""


def pages(*, frameworks: bool) -> list[Path]:
    """The pages that show Python: those that import one of the frameworks, or those that import none."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if blocks(page) and imports_frameworks(page) == frameworks]


def imports_frameworks(page: Path) -> bool:
    names = re.findall(r"^\s*(?:from|import) (\w+)", "\n".join(blocks(page)), re.MULTILINE)
    return not FRAMEWORKS.isdisjoint(names)


def blocks(page: Path) -> list[str]:
    """The blocks of Python on a page, each moved to the lines where it stands there, so that errors name those."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def run(page: Path) -> None:
    """Run the blocks of a page one after the other, as a reader would who pastes them into one session.

    The comment below a ``print`` is what it has to print, unless it begins with "such as".
    """
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(page), "exec"), names)
        for promise in promises(block):
            assert promise in printed.getvalue()


def promises(block: str) -> list[str]:
    lines = block.splitlines()
    prints = [node for node in ast.parse(block).body if ast.unparse(node).startswith("print(")]
    below = [takewhile(lambda line: line.startswith("#"), lines[node.end_lineno :]) for node in prints]
    comments = ["\n".join(line.removeprefix("# ") for line in found) for found in below]
    return [comment for comment in comments if not comment.startswith("such as")]

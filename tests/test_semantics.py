"""The table of behavior in docs/semantics.md agrees with the tests it cites."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^\| (?!\*\*|what|---)(.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
NAME = re.compile(r"`(test_\w+|Test\w+)")
DEFINED = re.compile(r"^\s*(?:def|class) (test_\w+|Test\w+)", re.MULTILINE)


def lines() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    return LINE.findall(page[page.index("## Case by case") :])


@cache
def defined() -> set[str]:
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]
    return {name for file in files for name in DEFINED.findall(file.read_text(encoding="utf-8"))}


def test_there_are_lines_to_look_at() -> None:
    assert len(lines()) > 50


@pytest.mark.parametrize("line", lines(), ids=lambda line: line[0])
def test_every_line_has_an_outcome_and_a_test(line: tuple[str, str, str]) -> None:
    _, outcome, named = line
    assert outcome.startswith(("works", "refused", "differs"))
    assert NAME.findall(named)
    assert set(NAME.findall(named)) <= defined()

"""Templates are filled once: a part may say anything, also what looks like a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpipe
from gpipe._template import filled

TEMPLATES = sorted(Path(gpipe.__file__).parent.rglob("_page.html"))


def package_of(template: Path) -> str:
    return ".".join(["gpipe", *template.parent.relative_to(Path(gpipe.__file__).parent).parts])


@pytest.mark.parametrize("template", TEMPLATES, ids=package_of)
@given(st.text() | st.just("{{title}} \\1"))
def test_every_part_stands_where_its_name_stood(template: Path, part: str) -> None:
    pieces = re.split(r"\{\{(\w+)\}\}", template.read_text(encoding="utf-8"))
    parts = {name: f"{name}: {part}" for name in pieces[1::2]}
    assert parts
    expected = [parts[piece] if k % 2 else piece for k, piece in enumerate(pieces)]
    assert filled(package_of(template), parts) == "".join(expected)

"""What the README and the docstrings of the package show is so."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import gpipe

README = Path(__file__).parents[1] / "README.md"
MODULES = ["gpipe", *(module.name for module in pkgutil.walk_packages(gpipe.__path__, prefix="gpipe."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.skipif(not README.exists(), reason="the tests were moved away from the README")
def test_the_programs_in_the_readme_run() -> None:
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert programs
    names: dict[str, object] = {"__name__": "readme"}
    for program in programs:
        exec(compile(program, str(README), "exec"), names)

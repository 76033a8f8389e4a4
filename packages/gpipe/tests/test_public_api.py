"""What the README and the docstrings of the package show is so."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
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


TRAINS = """
import sys, torch, gpipe
pipe = gpipe.GPipe(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2)
pipe.step(torch.ones(2, 2), loss_fn=torch.sum)
print(*(name for name in sys.modules if name.startswith(("blockpartition", "gpipe", "profiler"))))
"""


def test_a_training_loop_does_not_import_what_it_does_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True)
    found = {".".join(name.split(".")[:2]) for name in done.stdout.split()}
    others = {"blockpartition", "profiler", *(f"gpipe.{name}" for name in ("_check", "_plan", "balance", "timeline"))}
    assert "gpipe.engine" in found
    assert not found & others


def test_what_is_imported_later_is_what_its_module_has() -> None:
    assert {*gpipe.__all__, "balance", "nn", "simulate", "timeline"} <= {*dir(gpipe)}
    assert gpipe.plan is importlib.import_module("gpipe._plan").plan
    assert gpipe.nn is importlib.import_module("gpipe.nn")
    with pytest.raises(AttributeError, match="module 'gpipe' has no attribute 'plam'"):
        gpipe.__getattr__("plam")

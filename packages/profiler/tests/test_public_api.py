import doctest
import importlib
import os
import pkgutil
import subprocess
import sys

import pytest

import profiler

PUBLIC_MODULES = {"documents", "split", "text"}


def test_the_public_names_are_those_in_all():
    public = {name for name in vars(profiler) if not name.startswith("_")}
    assert public - PUBLIC_MODULES == set(profiler.__all__)


MODULES = [f"profiler.{module.name}" for module in pkgutil.iter_modules(profiler.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_modules_are_those_that_others_use():
    assert {name for name in MODULES if not name.startswith("profiler._")} == {
        f"profiler.{name}" for name in PUBLIC_MODULES
    }


def test_importing_is_cheap():
    """Nothing slow comes along that `import torch` has not already brought."""
    code = (
        "import sys, torch, microbatch, streams; before = set(sys.modules); import profiler;"
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('profiler')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    extra = done.stdout.split()
    assert {name.split(".")[0] for name in extra} <= {"statistics", "fractions", "_statistics", "decimal", "_decimal"}


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

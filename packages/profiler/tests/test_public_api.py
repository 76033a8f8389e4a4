import doctest
import importlib
import pkgutil

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

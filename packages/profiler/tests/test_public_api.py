import doctest
import importlib
import pkgutil

import pytest

import profiler

MODULES = [f"profiler.{module.name}" for module in pkgutil.iter_modules(profiler.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0

import doctest
import importlib
import pkgutil

import pytest

import blockpartition

MODULES = [f"blockpartition.{module.name}" for module in pkgutil.iter_modules(blockpartition.__path__)]


def test_all_is_everything_and_nothing_else_leaks():
    public = {name for name in vars(blockpartition) if not name.startswith("_")}
    assert public == set(blockpartition.__all__)
    assert blockpartition.__all__ == sorted(blockpartition.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name), extraglobs=vars(blockpartition)).failed == 0

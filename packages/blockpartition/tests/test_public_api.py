import doctest
import importlib
import pkgutil

import pytest

import blockpartition

MODULES = [f"blockpartition.{module.name}" for module in pkgutil.iter_modules(blockpartition.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name), extraglobs=vars(blockpartition)).failed == 0

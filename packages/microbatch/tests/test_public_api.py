import doctest
import importlib
import pkgutil

import pytest

import microbatch

MODULES = [f"microbatch.{module.name}" for module in pkgutil.iter_modules(microbatch.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def test_all_modules_are_private() -> None:
    assert all(name.startswith("microbatch._") for name in MODULES)

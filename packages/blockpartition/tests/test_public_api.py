import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import blockpartition

MODULES = [f"blockpartition.{module.name}" for module in pkgutil.iter_modules(blockpartition.__path__)]


def test_all_is_everything_and_nothing_else_leaks():
    public = {name for name in vars(blockpartition) if not name.startswith("_")}
    assert public == set(blockpartition.__all__)
    assert blockpartition.__all__ == sorted(blockpartition.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    assert (
        doctest.testmod(module, extraglobs={n: getattr(blockpartition, n) for n in blockpartition.__all__}).failed == 0
    )


def test_only_the_standard_library_is_imported():
    code = (
        "import sys; before = set(sys.modules); import blockpartition; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'blockpartition'}))"
    )
    path = repr([entry for entry in sys.path if entry])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"

"""Public functions document arguments, results and exceptions in Google style, and their examples run."""

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .pages import PACKAGES

Function = Callable[..., Any]
PATHS = {package: importlib.import_module(package).__path__ for package in PACKAGES}
MODULES = [each.name for package in PACKAGES for each in pkgutil.walk_packages(PATHS[package], f"{package}.")]


@pytest.mark.parametrize("name", [*PACKAGES, *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_all_modules_of_microbatch_are_private() -> None:
    assert all(name.startswith("microbatch._") for name in MODULES if name.startswith("microbatch."))


def modules(package: str) -> Iterator[Any]:
    """The package, and its modules that say what they offer."""
    top = importlib.import_module(package)
    names = [each.name for each in pkgutil.iter_modules(top.__path__) if not each.name.startswith("_")]
    offered = [importlib.import_module(f"{package}.{name}") for name in names if name != "__main__"]
    yield from [top, *(module for module in offered if hasattr(module, "__all__"))]


def functions(package: str) -> dict[str, Function]:
    """Return public functions, and methods of public classes that have their own docstring."""
    found: dict[str, Function] = {}
    for module in modules(package):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                found[f"{module.__name__}.{name}"] = thing
            elif inspect.isclass(thing):
                found |= {f"{thing.__module__}.{name}.{own}": method for own, method in methods(thing)}
    return found


def methods(cls: type) -> Iterator[tuple[str, Function]]:
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(function) and not name.startswith("_") and not is_told_by_a_base(cls, name, function):
            yield name, inspect.unwrap(function)


def is_told_by_a_base(cls: type, name: str, function: Function) -> bool:
    above = [getattr(base, name) for base in cls.__mro__[1:] if hasattr(base, name)]
    return any(function.__doc__ in (None, base.__doc__) for base in above)


each_function = pytest.mark.parametrize(
    "function", [pytest.param(each, id=name) for package in PACKAGES for name, each in functions(package).items()]
)


def parameters(function: Function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def section(function: Function, name: str) -> str:
    """Return the text of a section of the docstring, dedented; empty if it does not exist."""
    found = re.search(rf"^{name}:\n((?:    .*\n?|\n)*)", inspect.getdoc(function) or "", re.M)
    return textwrap.dedent(found[1]) if found else ""


@functools.cache
def body(function: Function) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def is_method(function: Function) -> bool:
    return "." in function.__qualname__


@each_function
def test_it_says_what_it_takes(function: Function) -> None:
    assert section(function, "Args") or not parameters(function)


@each_function
def test_the_arguments_are_those_of_the_signature(function: Function) -> None:
    entries = re.findall(r"^(\w[\w*, ]*):", section(function, "Args"), re.M)
    told = [name.strip(" *") for entry in entries for name in entry.split(",")]
    assert set(told) <= set(parameters(function))
    assert len(told) == len(set(told))


@each_function
def test_it_says_what_it_gives(function: Function) -> None:
    """A method without arguments may do so in its summary, like a property."""
    gives = inspect.signature(function).return_annotation not in (None, "None")
    named = section(function, "Returns") or section(function, "Yields")
    assert named or not gives or (is_method(function) and not parameters(function))


@each_function
def test_it_says_what_it_raises(function: Function) -> None:
    raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(body(function)))
    assert section(function, "Raises") or not raises
    assert not re.search(r"^ *Raises? \w*Error", inspect.getdoc(function) or "", re.M) or section(function, "Raises")

"""The programs under examples/ as modules, and access to their output."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))  # as when run as a script: their shared code is a module there


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # where dataclasses look for the types of their fields
    specification.loader.exec_module(module)
    return module


def number(pattern: str, told: str) -> float:
    (found,) = numbers(pattern, told)
    return found


def numbers(pattern: str, told: str) -> tuple[float, ...]:
    """Return the groups of the pattern as numbers."""
    found = re.search(pattern, told)
    assert found is not None, pattern
    return tuple(map(float, found.groups()))


def check_comparison(told: str, closeness: float = 1e-4) -> None:
    """The tables at the end of an example: the plain model's loss and gradients, and less memory on each device."""
    without, within = numbers(r"loss of a mini-batch +│ ([\d.]+) +│ ([\d.]+)", told)
    assert without == pytest.approx(within, rel=closeness)
    assert number(r"differ by at most +│ +│ ([\d.e-]+) of the largest", told) < closeness
    assert number(r" 1F1B │.*?(\d+)%", told) <= number(r" fill-drain │.*?(\d+)%", told) < 100

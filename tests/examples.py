"""The programs under examples/, as modules, and what they print."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # where dataclasses look for the types of their fields
    specification.loader.exec_module(module)
    return module


def number(pattern: str, told: str) -> float:
    found = re.search(pattern, told)
    assert found is not None, pattern
    return float(found[1])

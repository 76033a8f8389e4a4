"""Dispatch modes are cheap to load, and out of sight of torch.compile."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from profiler import Births, DispatchMode

pytestmark = pytest.mark.timeout(120)

FRESH = """
import sys, torch
from profiler import Births
with Births() as births:
    kept = torch.ones(2) + 1
assert births.alive() == 8
print("torch._dynamo" in sys.modules)
"""


def test_seconds_of_imports_are_not_spent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout == "False\n"


def test_what_a_mode_does_is_hidden_once_there_is_somebody_to_hide_from() -> None:
    import torch._dynamo

    class Mode(DispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operation(*args, **(kwargs or {}))

    own = Mode.__torch_dispatch__
    with Mode(), Mode():
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    assert getattr(Mode.__torch_dispatch__, "__wrapped__", None) is own
    assert Mode.ignore_compile_internals()


def test_a_compiled_function_under_a_mode_is_compiled() -> None:
    calls = []

    def backend(graph: Any, example: Any) -> Any:
        calls.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    with Births():
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    torch._dynamo.reset()
    assert len(calls) == 1

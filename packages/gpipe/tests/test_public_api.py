"""What is imported, and when."""

import importlib
import subprocess
import sys

import pytest

import gpipe

TRAINS = """
import sys, torch, gpipe
pipe = gpipe.GPipe(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2)
pipe.step(torch.ones(2, 2), loss_fn=torch.sum)
print(*(name for name in sys.modules if name.startswith(("blockpartition", "gpipe", "profiler"))))
"""


def test_a_training_loop_does_not_import_what_it_does_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True)
    found = {".".join(name.split(".")[:2]) for name in done.stdout.split()}
    others = {"blockpartition", "profiler", *(f"gpipe.{name}" for name in ("_check", "_plan", "balance", "timeline"))}
    assert "gpipe.engine" in found
    assert not found & others


def test_what_is_imported_later_is_what_its_module_has() -> None:
    assert {*gpipe.__all__, "balance", "nn", "simulate", "timeline"} <= {*dir(gpipe)}
    assert gpipe.plan is importlib.import_module("gpipe._plan").plan
    assert gpipe.nn is importlib.import_module("gpipe.nn")
    with pytest.raises(AttributeError, match="module 'gpipe' has no attribute 'plam'"):
        gpipe.__getattr__("plam")

"""Imports: names, paths, and modules loaded lazily."""

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


def test_training_loop_imports_no_unused_modules() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True)
    found = {".".join(name.split(".")[:2]) for name in done.stdout.split()}
    others = {"blockpartition", "profiler", *(f"gpipe.{name}" for name in ("_check", "_plan", "balance", "timeline"))}
    assert "gpipe.engine" in found
    assert not found & others


def test_lazy_attributes_match_their_modules() -> None:
    assert {*gpipe.__all__, "balance", "nn", "simulate", "timeline"} <= {*dir(gpipe)}
    assert gpipe.plan is importlib.import_module("gpipe._plan").plan
    assert gpipe.nn is importlib.import_module("gpipe.nn")
    with pytest.raises(AttributeError, match="module 'gpipe' has no attribute 'plam'"):
        gpipe.__getattr__("plam")


# Imports in programs that use torchgpipe: its benchmarks (ResNet, U-Net, AmoebaNet-D, and their scripts), its tests,
# and repositories that use it.
IMPORTS = [
    "import torchgpipe; torchgpipe.GPipe",
    "from torchgpipe import GPipe, is_checkpointing, is_recomputing",
    "from torchgpipe.balance import balance_by_size, balance_by_time",
    "from torchgpipe.balance import balance_cost",
    "from torchgpipe.balance import blockpartition; blockpartition.solve",
    "from torchgpipe.balance.blockpartition import solve",
    "from torchgpipe.balance.profile import detach, layerwise_sandbox",
    "from torchgpipe.balance.profile import profile_sizes, profile_times",
    "from torchgpipe.batchnorm import DeferredBatchNorm",
    "from torchgpipe.checkpoint import is_checkpointing, is_recomputing",
    "from torchgpipe.gpipe import GPipe, verify_module",
    "from torchgpipe.gpipe import BalanceError, recommend_auto_balance, split_module",
    "from torchgpipe import microbatch; microbatch.scatter",
    "from torchgpipe.microbatch import Batch, check, gather, scatter",
    "from torchgpipe.pipeline import Pipeline",
    "from torchgpipe.skip import Namespace, pop, skippable, stash",
    "from torchgpipe.skip import Namespace, skippable, stash, pop, verify_skippables",
    "from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout",
    "from torchgpipe.skip.namespace import Namespace",
    "from torchgpipe.skip.skippable import Skippable, pop, skippable, stash, verify_skippables",
]


@pytest.mark.parametrize("line", IMPORTS)
def test_torchgpipe_can_be_renamed(line: str) -> None:
    exec(line.replace("torchgpipe", "gpipe"), {})


IMPORTED_ANEW = """
import sys
from importlib import import_module

for first in ("gpipe.skip.skippable", "gpipe.balance.profile"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpipe"]:
        del sys.modules[name]
    import_module(first)
    from gpipe.balance import profile
    from gpipe.skip import skippable
    from gpipe.skip.skippable import skippable as same

    assert callable(skippable) and skippable is same, first
    assert profile.profile_times, first
assert "torch._dynamo" not in sys.modules, "the compiler takes seconds to import"
"""


def test_function_hides_module_of_same_name() -> None:
    """Importing gpipe imports no compiler."""
    subprocess.run([sys.executable, "-c", IMPORTED_ANEW], check=True)

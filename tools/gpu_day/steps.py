"""The steps of each part, the most important first, and their time limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Part(NamedTuple):
    """Steps that together take no longer than ``seconds``."""

    title: str
    seconds: float
    steps: tuple[Step, ...]


class Step(NamedTuple):
    """A command, run from the root of the repository.

    Attributes:
        name: in the log.
        title: what it is for.
        arguments: of Python.
        limit: seconds.
        tests: whether the command is pytest.
        needs: a module without which the step is skipped.
        settings: more environment variables.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    limit: float
    tests: bool = False
    needs: str = "torch"
    settings: Mapping[str, str] = {}

    @property
    def command(self) -> list[str]:
        # All threads print their stacks when a step that hangs is aborted.
        return [sys.executable, "-X", "faulthandler", *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Sources instead of installed packages, and reports of stalls, with the settings of this step."""
        sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
        paths = {"PYTHONPATH": os.pathsep.join([*sources, str(ROOT)])}
        return {**os.environ, "GPIPE_STALL_SECONDS": "20", "PYTHONUNBUFFERED": "1", **paths, **self.settings}


def _tests(name: str, title: str, limit: float, *files: str) -> Step:
    return Step(name, title, ("-m", "pytest", *_PYTEST, *files), limit, tests=True, needs="hypothesis")


def _program(name: str, title: str, limit: float, *arguments: str, **settings: str) -> Step:
    return Step(name, title, ("-m", f"tools.gpu_day.programs.{arguments[0]}", *arguments[1:]), limit, settings=settings)


# The settings of pyproject.toml want plugins that need not be there. With -v a test that hangs is the last one named.
_PYTEST = ("-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib", "-W", "default")
_PYTEST += ("-m", "cuda", "--maxfail=60")

PARTS = {
    "A": Part(
        "First steps",
        240,
        (
            _tests(
                "streams", "Streams and their witnesses: if these fail, nothing else counts", 60, "packages/streams"
            ),
            _program("waits", "Steps under set_sync_debug_mode('error'), after a first one", 100, "waits"),
            _program("group", "A process group over NCCL, of this process alone", 60, "group"),
        ),
    ),
    "B": Part(
        "Tests",
        570,
        (
            _tests(
                "tests",
                "All tests that need a GPU, virtual devices first",
                480,
                "packages/gpipe/tests/test_virtual.py",
                "packages",
            ),
            _program(
                "sanitizer",
                "Steps on one thread under the stream sanitizer",
                80,
                "waits",
                "--inline",
                TORCH_CUDA_SANITIZER="1",
            ),
        ),
    ),
    "C": Part(
        "Measurements",
        570,
        (
            _program("launches", "What one process can feed", 80, "launches"),
            _program("peaks", "Peak of memory against micro-batches", 80, "peaks"),
            _program("copies", "A stage on the CPU before one on the GPU: do copies overlap?", 60, "copies"),
            _program("transformer", "A transformer of 8 layers", 80, "transformer"),
            _program("whole loss", "A full-batch loss, a call and 1F1B", 60, "whole_loss"),
            _program("plans", "Plans: predicted and measured", 120, "plans"),
            Step("benchmarks", "Benchmarks", ("-m", "benchmarks", "cuda"), 100, needs="rich"),
        ),
    ),
    "D": Part(
        "Compilers, allocators, processes, Hugging Face models",
        570,
        (
            _program("compiled", "Compiled stages in two workers", 80, "compiled"),
            _program("out of memory", "A real out of memory, and the next step", 50, "out_of_memory"),
            _program("two ranks", "Two processes on one GPU, over host memory", 60, "ranks"),
            _program(
                "expandable",
                "The transformer with expandable segments",
                60,
                "transformer",
                PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
            ),
            _program(
                "async",
                "The transformer with cudaMallocAsync",
                60,
                "transformer",
                PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
            ),
            _program("families", "Hugging Face models, on padded batches", 230, "families")._replace(
                needs="transformers"
            ),
        ),
    ),
    "E": Part(
        "A model larger than the GPU",
        540,
        (
            _tests(
                "offloaded tests",
                "Stages whose parameters are on the host",
                120,
                "packages/gpipe/tests/engine/test_offloaded.py",
            ),
            _program(
                "offloaded", "Beside the same model resident, FSDP2's CPU offload and save_on_cpu", 400, "offloaded"
            ),
        ),
    ),
}

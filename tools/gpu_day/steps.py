"""What is done, in the order of how much the rest depends on it, and how long each may take."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

SAFETY = "deadlock or error or flat or peak or generator or mask or random or autocast or two_pipes"
ORDER = "nobody or still_being or own_streams or caller_s_stream or no_block or skips or zeroed or does_not_wait"


class Step(NamedTuple):
    """A command, run from the root of the repository.

    Attributes:
        name: of its files.
        title: what it is for.
        arguments: of Python.
        limit: seconds.
        tests: whether they are those of pytest.
        needs: a module without which it is skipped.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    limit: float
    tests: bool = False
    needs: str = "torch"


def _tests(name: str, title: str, limit: float, *selection: str) -> Step:
    return Step(name, title, ("-m", "pytest", *_PYTEST, "-m", "cuda", *selection), limit, tests=True, needs="pytest")


# The settings of pyproject.toml want plugins that need not be there.
_PYTEST = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib", "-W", "default", "--maxfail=40")
_GPIPE = "packages/gpipe/tests/test_cuda.py"

STEPS = (
    _tests("streams", "The vocabulary; if its witnesses fail, nothing else counts", 60, "packages/streams/tests"),
    _tests("safety", "No hang; errors, memory, random numbers", 100, _GPIPE, "-k", SAFETY),
    _tests("order", "Nobody reads what is not written yet, nor what is not theirs any more", 110, _GPIPE, "-k", ORDER),
    _tests("parity", "The results of the plain model", 100, _GPIPE, "-k", f"not ({SAFETY} or {ORDER})"),
    _tests(
        "virtual", "Stages on one GPU with workers and streams of their own", 60, "packages/gpipe/tests/test_virtual.py"
    ),
    _tests(
        "nccl", "Two GPUs with a process each: tensors over NCCL", 45, "packages/gpipe/tests/distributed/test_nccl.py"
    ),
    _tests("microbatch", "Micro-batches on a GPU", 30, "packages/microbatch/tests/test_scatter.py"),
    _tests("profiler", "The profiler beside the allocator", 40, "packages/profiler/tests/test_cuda.py"),
    Step("transformer", "A transformer of 8 layers", ("-m", "tools.gpu_day.transformer"), 90),
    Step("benchmarks", "Benchmarks", ("-m", "benchmarks", "cuda", "--quick"), 60, needs="rich"),
)


def environment() -> dict[str, str]:
    """Of each step: sources instead of installed packages, few examples of each property, and reports of stalls."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    settings = {"CI": "1", "HYPOTHESIS_PROFILE": "few", "GPIPE_STALL_SECONDS": "20", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join([*sources, str(ROOT)])}


def command(step: Step, report: Path, *, gpu: bool) -> list[str]:
    """The command; ``report`` is the file of JUnit. Without a GPU tests are only looked for."""
    if not step.tests:
        return [sys.executable, *step.arguments]
    each = ["--timeout=60"] if importlib.util.find_spec("pytest_timeout") else []
    last = [f"--junitxml={report}", *each] if gpu else ["--collect-only"]
    return [sys.executable, *step.arguments, *last]

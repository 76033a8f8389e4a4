"""Settings shared by all tests: the number of Hypothesis examples, and which tests run where."""

import functools
import gc
import importlib.util
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Small work is done sooner on one thread, above all where several processes want the cores, and the share of a caller
# changes no order of sums. Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Every run uses the same examples, on every machine. `nox -s search` draws new ones.
_SHARED = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", max_examples=10, derandomize=True, **_SHARED)
settings.load_profile("fixed")

# Hypothesis also draws constants that it finds in the source of imported modules of ours. Then an example would depend
# on the source of our modules, and on which test files the process has imported so far.
if hasattr(providers, "_get_local_constants"):
    _local_constants = providers._get_local_constants
    providers._get_local_constants = providers.Constants

# Tests interrupt themselves, which a process that a shell started in the background would ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, help="run properties only, with this many random examples of each")
    parser.addoption("--seconds", type=float, default=float("inf"), help="and start no further example after so long")
    parser.addoption("--uneven-clock", action="store_true", help="measure times as on a machine that is busy at times")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):  # processes of pytest-xdist print nothing
        config.pluginmanager.register(_Failures(reporter))
    if config.getoption("--uneven-clock"):
        time.perf_counter = _UnevenClock()
    examples = config.getoption("--examples")
    if examples is not None:
        # Before test files are imported: some take a share of the number.
        if hasattr(providers, "_get_local_constants"):
            providers._get_local_constants = _local_constants
        settings.register_profile("search", max_examples=examples, **_SHARED)
        settings.load_profile("search")
        config.pluginmanager.register(_Search(examples, config.getoption("--seconds")))


class _UnevenClock:
    """``time.perf_counter``, which runs up to 30 times as fast as the real one for a moment."""

    def __init__(self) -> None:
        self._real = time.perf_counter
        self._lock = threading.Lock()
        self._seen = self._change = self._now = self._real()
        self._speed = 1
        self._draw = random.Random().choice  # separate from Hypothesis's generator

    def __call__(self) -> float:
        with self._lock:
            seen = self._real()
            self._now += self._speed * (seen - self._seen)
            self._seen = seen
            if seen > self._change:
                self._speed, self._change = self._draw((1, 1, 3, 10, 30)), seen + self._draw((0.05, 0.3, 1.0))
            return self._now


class _Failures:
    """Names each failure when it happens: a run that is interrupted prints no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)


class _Search:
    """Runs properties only, each for some seconds, and says at the end how many examples they had."""

    def __init__(self, examples: int, seconds: float) -> None:
        self._examples = examples
        self._seconds = seconds
        self._drawn: dict[str, int] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kinds: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            kinds[getattr(item.obj, "is_hypothesis_test", False)].append(item)
        config.hook.pytest_deselected(items=kinds[False])
        items[:] = kinds[True]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        test = getattr(item.obj, "__func__", item.obj)
        machine = getattr(test, "_hypothesis_state_machine_class", None)
        # The method called once per example, and the object with the settings: a test function or a state machine.
        caller, called = (test.hypothesis, "inner_test") if machine is None else (machine, "__init__")
        asked, kept = (test, "_hypothesis_internal_use_settings") if machine is None else (item.cls, "settings")
        body, shared = getattr(caller, called), getattr(asked, kept)
        own, end, drawn = settings(shared), time.monotonic() + self._seconds, 0

        @functools.wraps(body)
        def limited(*arguments: object, **keywords: object) -> None:
            nonlocal drawn
            drawn += 1
            if time.monotonic() > end:
                own._max_examples = 1  # asked after each example: Hypothesis itself has no limit of time
            body(*arguments, **keywords)

        setattr(caller, called, limited)
        setattr(asked, kept, own)
        try:
            return (yield)
        finally:
            setattr(caller, called, body)
            setattr(asked, kept, shared)
            item.user_properties.append(("examples", drawn))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        drawn = dict(report.user_properties).get("examples")
        if report.when == "call" and drawn is not None:
            self._drawn[report.nodeid] = drawn

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Report how many examples were drawn, and how to reproduce each failure."""
        line = terminalreporter.line
        fewest = sorted(self._drawn, key=self._drawn.__getitem__)[:10]
        terminalreporter.section("search")
        line(f"{len(self._drawn)} properties, {sum(self._drawn.values()):,} examples; fewest:")
        for name in fewest:
            line(f"{self._drawn[name]:>8,}  {name}")
        seed = config.getoption("--hypothesis-seed", None)
        for report in terminalreporter.getreports("failed"):
            how = f"--examples={self._examples} --hypothesis-seed={seed}"
            line(f'repeat a failure: python -m nox -s search -- {how} "{report.nodeid}"')


@pytest.fixture(autouse=True, scope="module")
def _frozen_modules() -> None:
    """Imported modules live to the end: a collection that leaves them out takes a tenth of its time.

    Repeated per test file, because tests import further modules (compilers, for example).
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that memory held by reference cycles counts as leaked."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


_HOOK = sys.excepthook


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """No test leaves a process group behind: others would see it, and errors of any kind begin with ``[rank0]``."""
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_available() or not distributed.is_initialized(), (
        f"{item.nodeid} has left a process group"
    )
    hook, sys.excepthook = sys.excepthook, _HOOK
    assert hook is _HOOK, f"{item.nodeid} has left sys.excepthook changed, as init_process_group() does: {hook}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests and tests that need a GPU, unless requested with ``-m``."""
    _mark_all_but_some(items)
    asked = config.getoption("-m")
    left_out = set() if "long" in asked else {"long"}
    on_gpus = [item for item in items if "cuda" in item.keywords]
    if on_gpus and not _cuda_is_available():
        if "cuda" not in asked:
            left_out.add("cuda")
        for item in on_gpus:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
    others = [item for item in items if left_out & item.keywords.keys()]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if not left_out & item.keywords.keys()]


def _mark_all_but_some(items: list[pytest.Item]) -> None:
    """Mark the cases of a test that is marked ``one_in`` as long, except for one in that many."""
    seen: dict[object, int] = {}
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            seen[test] = seen.get(test, -1) + 1
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.long)


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()

"""What every test of the repository shares: how many examples a property tries, and which tests run where."""

import gc
import importlib.util
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Small work is done sooner on one thread, above all where several processes want the cores, and the share of a caller
# changes no order of sums. Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# One truth: whoever runs the tests, on whatever machine, runs the same examples. `nox -s search` draws others.
_SHARED = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", max_examples=25, derandomize=True, **_SHARED)
settings.load_profile("fixed")

# Hypothesis also draws constants that it finds in the source of imported modules of ours. Then an example would depend
# on what else is written there, and on which test files a process has imported before.
if hasattr(providers, "_get_local_constants"):
    _local_constants = providers._get_local_constants
    providers._get_local_constants = providers.Constants

# Tests interrupt themselves, which a process that a shell started in the background would ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, help="draw this many random examples of each property (nox -s search)")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):  # processes of pytest-xdist print nothing
        config.pluginmanager.register(_Failures(reporter))
    examples = config.getoption("--examples")
    if examples is not None:
        # Before test files are imported: some take a share of the number.
        if hasattr(providers, "_get_local_constants"):
            providers._get_local_constants = _local_constants
        settings.register_profile("search", max_examples=examples, **_SHARED)
        settings.load_profile("search")


class _Failures:
    """Names each failure when it happens: a run that is interrupted prints no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)


@pytest.fixture(autouse=True, scope="module")
def _frozen_modules() -> None:
    """Imported modules live to the end: a collection that leaves them out takes a tenth of its time.

    For each file anew, because tests import more: compilers, for example.
    """
    gc.collect()
    gc.freeze()


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
    """Leave out what needs a GPU or much time, unless it is asked for."""
    asked = config.getoption("-m")
    left_out = set() if "long" in asked else {"long"}
    if not _cuda_is_available():
        if "cuda" not in asked:
            left_out.add("cuda")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
    others = [item for item in items if left_out & item.keywords.keys()]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if not left_out & item.keywords.keys()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How to repeat each failure of a search."""
    seed = config.getoption("--hypothesis-seed", None)
    failed = terminalreporter.getreports("failed")
    if config.getoption("--examples") is None or not failed:
        return
    terminalreporter.section("repeat a failure")
    for report in failed:
        terminalreporter.line(
            f"python -m nox -s search -- --examples={config.getoption('--examples')} --hypothesis-seed={seed} "
            f'"{report.nodeid}"'
        )


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()

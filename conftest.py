"""What every test of the repository shares: the sizes of the property tests, and which tests run where."""

import gc
import importlib.util
import os
import signal
import sys

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=100)
settings.register_profile("long", deadline=None, max_examples=2_000)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Tests interrupt themselves, which a process that a shell started in the background would ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
    chosen = config.getoption("-m")
    many_examples = settings.get_current_profile_name() == "long"
    for item in items:
        if many_examples:  # the time limits that files set are for fewer
            item.add_marker(pytest.mark.timeout(1800), append=False)
        if "long" in item.keywords and "long" not in chosen:
            item.add_marker(pytest.mark.skip(reason="long: run with -m long"))
        if "cuda" in item.keywords and not _cuda_is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()

"""Runs these tests only if requested by path, since a simulated accelerator is global to the process."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import accelerator, build

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = any(Path(config.invocation_params.dir, a.split("::")[0]).is_relative_to(HERE) for a in config.args)
    return None if asked else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make a hang end the process with the stacks of all threads, as one blocked in the device receives no signal."""
    limit = config.getoption("--timeout") or 300
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit, method="thread"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build it now if need be: later the time of a test is limited."""
    wanted = any(item.path.is_relative_to(HERE) for item in session.items)
    if wanted and not session.config.option.collectonly and build.compiler() is not None:
        accelerator.library()


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Check that each test ends without an unexpected race."""
    if build.compiler() is None:
        pytest.skip("no simulated accelerator here: no C++ compiler (c++, or the one that CXX names) is on the path")
    gc.collect()  # else a worker may free leftovers of the previous test, unordered with their last use
    with accelerator.no_races():
        yield

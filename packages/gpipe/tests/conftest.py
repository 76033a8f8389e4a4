"""Fixtures used by several files."""

from collections.abc import Iterator

import pytest

from gpipe._plan import _measure as of_plans
from gpipe.engine import _saved
from gpipe.model import _measure as of_blocks

from .worlds import of_each_size

worlds = pytest.fixture(scope="session")(of_each_size)


@pytest.fixture(autouse=True, scope="session")
def small_tensors_move() -> Iterator[None]:
    """Offload even the small tensors of these tests with ``checkpoint="offload"``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_saved, "SMALL", 0)
        yield


@pytest.fixture(autouse=True, scope="session")
def short_measurements() -> Iterator[None]:
    """Measure a few rounds instead of a second, since test layers take microseconds, or far longer than the rest."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(of_plans, "SECONDS", 0.02)
        patched.setitem(of_blocks.measure_rounds.__kwdefaults__, "timeout", 0.2)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run only the first case of each test over several processes, since they are slow; mark the others long."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()):
            cases.setdefault((str(item.path), getattr(item, "originalname", item.name)), []).append(item)
    for _, *others in cases.values():
        for item in others:
            item.add_marker(pytest.mark.long)

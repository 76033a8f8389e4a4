"""Fixtures that several files ask for by name."""

from collections.abc import Iterator

import pytest

from gpipe._plan import _measure
from gpipe.engine import _saved

from .worlds import of_each_size

worlds = pytest.fixture(scope="session")(of_each_size)


@pytest.fixture(autouse=True, scope="session")
def small_tensors_move() -> Iterator[None]:
    """With ``checkpoint="offload"``, also the small tensors of these tests go to the host."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_saved, "SMALL", 0)
        yield


@pytest.fixture(autouse=True, scope="session")
def plans_measure_briefly() -> Iterator[None]:
    """Layers of tests take microseconds, and no test asks for seconds: as few rounds as there have to be will do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_measure, "SECONDS", 0.02)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test over several processes, which take long, the first stands for all."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()):
            cases.setdefault((str(item.path), getattr(item, "originalname", item.name)), []).append(item)
    for _, *others in cases.values():
        for item in others:
            item.add_marker(pytest.mark.long)

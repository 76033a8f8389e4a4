"""The processes that tests of ranks share."""

from collections.abc import Iterator

import pytest
from packages.gpipe.tests.worlds import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World(2)
    yield opened
    opened.close()

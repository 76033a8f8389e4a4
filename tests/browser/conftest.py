"""One browser for all tests of pages."""

from collections.abc import Iterator
from typing import Any

import pytest

from .looking import CHROMIUM, QUIET


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()

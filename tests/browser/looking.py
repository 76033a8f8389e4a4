"""Helpers of the page tests: the browser, and positions of elements on the screen."""

import shutil
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)

in_a_browser = [pytest.mark.skipif(CHROMIUM is None, reason="no browser tests: there is no chromium on the path")]

# Nothing here needs the network, and a browser that looks for it takes longer to start.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def boxes(page: Any, selector: str) -> list[dict[str, float]]:
    script = """found => found.map(each => {
        const { left, right, top, bottom } = each.getBoundingClientRect();
        return { left, right, top, bottom };
    })"""
    return page.locator(selector).evaluate_all(script)


def inside(inner: dict[str, float], outer: dict[str, float], slack: float = 0.5) -> bool:
    lower = all(inner[side] >= outer[side] - slack for side in ("left", "top"))
    return lower and all(inner[side] <= outer[side] + slack for side in ("right", "bottom"))


def overlap(a: dict[str, float], b: dict[str, float], slack: float = 3.0) -> bool:
    return all(
        min(a[end], b[end]) - max(a[begin], b[begin]) > slack for begin, end in (("left", "right"), ("top", "bottom"))
    )

"""The page of a plan as a reader sees it, on a wide screen and on a telephone.

Needs playwright and an installed Chromium; skipped without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.skip import pop, skippable, stash

from .looking import boxes, in_a_browser, inside

pytest.importorskip("playwright.sync_api", reason="no browser tests: playwright is not installed")

pytestmark = in_a_browser
WIDTHS = [420, 1200]
each_width = pytest.mark.parametrize("page", WIDTHS, indirect=True)


@skippable(stash=["image"])
class Down(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("image", x)
        return nn.functional.max_pool2d(x, 2)


@skippable(pop=["image"])
class Up(nn.Module):
    def forward(self, x: Tensor) -> Any:
        image = yield pop("image")
        return nn.functional.interpolate(x, scale_factor=2) + image


@pytest.fixture(scope="module")
def plan() -> gpipe.Plan:
    convolutions = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
    model = nn.Sequential(next(convolutions), Down(), *convolutions, Up(), nn.Flatten())
    return gpipe.plan(model, torch.zeros(16, 3, 8, 8), "4x100kB")


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any, plan: gpipe.Plan, tmp_path: Path) -> Iterator[Any]:
    """The page on a screen of some width, without a network."""
    plan.save(tmp_path / "plan.html")
    context = browser.new_context(offline=True, viewport={"width": request.param, "height": 900})
    found, complaints = context.new_page(), []
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("requestfailed", lambda failed: complaints.append(failed.url))
    found.goto((tmp_path / "plan.html").as_uri())
    yield found
    context.close()
    assert complaints == []


@each_width
def test_only_tables_and_the_timeline_scroll_sideways(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.locator(".scroll").count() == 3


@each_width
def test_bars_are_as_long_as_what_they_stand_for(page: Any, plan: gpipe.Plan) -> None:
    bars = boxes(page, ".bar")
    assert len(bars) == len(plan.sizes)
    for j, (bar, need) in enumerate(zip(bars, plan.predicted.bytes, strict=True)):
        parts = boxes(page, f".device >> nth={j} >> .bar i")
        assert all(inside(part, bar) for part in parts)
        share = sum(part["right"] - part["left"] for part in parts) / (bar["right"] - bar["left"])
        assert share == pytest.approx(need.total / 100_000, abs=0.01)


@each_width
def test_a_kind_stands_beside_its_colour(page: Any) -> None:
    for entry, swatch in zip(boxes(page, ".legend span"), boxes(page, ".legend i"), strict=True):
        assert inside(swatch, entry)
        assert entry["bottom"] - entry["top"] < 30


@each_width
def test_it_says_what_was_chosen_and_why_the_timeline_is_not_as_long(page: Any, plan: gpipe.Plan) -> None:
    text = page.locator("body").inner_text()
    assert f"balance={plan.balance}, chunks={plan.chunks}" in text
    assert "Actions alone: " in text
    assert page.locator("svg .cell").count() == len(plan.timeline.events)
    assert page.locator("table").nth(1).locator("th").first.inner_text() == "schedule"

"""Reports as notebooks show them: words stand out from the paper, light and dark, whatever is around them.

Needs playwright and an installed Chromium; skipped without.
"""

from typing import Any

import pytest
import torch
from torch import nn

import gpipe

from .looking import in_a_browser
from .test_timeline import brightness, contrast

pytest.importorskip("playwright.sync_api", reason="no browser tests: playwright is not installed")

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(0), nn.Dropout(), nn.Linear(4, 4))
    sample = torch.zeros(8, 4)
    plan = gpipe.plan(model, sample, ["cpu", "cpu"], chunks=[2], calibrate=False)
    return {"plan": plan, "report": gpipe.check(model, sample), "timeline": plan.timeline}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plan", "report", "timeline"])
def test_words_stand_out_from_the_paper(browser: Any, reports: dict[str, Any], name: str, scheme: str) -> None:
    context = browser.new_context(offline=True, color_scheme=scheme)
    page = context.new_page()
    page.set_content(f"<body>{reports[name]._repr_html_()}</body>")
    colours = (
        "found => found.map(e => [e.tagName, getComputedStyle(e)]).map(([t, s]) => t == 'text' ? s.fill : s.color)"
    )
    words = page.locator("text:not(.number), h1, h2, p, th, td, li, pre").evaluate_all(colours)
    context.close()
    paper = brightness("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 31)")
    assert words
    assert [colour for colour in set(words) if contrast(brightness(colour), paper) < 4.5] == []

"""Timelines rendered in a real browser: layout and contrast.

Needs playwright and an installed Chromium; skipped without.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpipe.schedule import Schedule, fill_drain, interleaved, one_forward_one_backward, zero_bubble
from gpipe.simulate import StageCost, simulate

from .looking import boxes, in_a_browser, inside, overlap

playwright = pytest.importorskip("playwright.sync_api", reason="no browser tests: playwright is not installed")

pytestmark = in_a_browser

COST = StageCost(0.001, 0.002, activation_bytes=2**20, boundary_bytes=2**14, layers="conv <3 × 3>, relu")
DRAWN: dict[str, list[Schedule]] = {
    "1f1b-4x8": [one_forward_one_backward(8, 4)],
    "1f1b-8x64": [one_forward_one_backward(64, 8)],
    "zero-bubble-8x64": [zero_bubble(64, 8, checkpoint_stop=20)],
    "narrow-4x12": [zero_bubble(12, 4)],
    "everything-4x8": [fill_drain(8, 4, checkpoint_stop=7), interleaved(8, 8, 4), zero_bubble(8, 4)],
}
each_drawing = pytest.mark.parametrize("name", DRAWN)


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawings")
    for name, schedules in DRAWN.items():
        timeline, *others = (simulate(schedule, [COST] * len(schedule), transfer=0.0001) for schedule in schedules)
        timeline.save(folder / f"{name}.svg", title=name, compare_with={str(k): t for k, t in enumerate(others)})
    return folder


@pytest.fixture
def look_at(browser: Any, drawings: Path) -> Iterator[Callable[..., Any]]:
    """Open a drawing without a network; whatever goes wrong in the page goes wrong here."""
    contexts, complaints = [], []

    def look(name: str, **circumstances: Any) -> Any:
        context = browser.new_context(
            offline=True, viewport={"width": 1700, "height": 800}, reduced_motion="reduce", **circumstances
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.goto((drawings / name).as_uri())
        return page

    yield look
    for context in contexts:
        context.close()
    assert complaints == []


@each_drawing
def test_no_word_is_cut_off_or_covers_another(look_at: Callable[..., Any], name: str) -> None:
    page = look_at(f"{name}.svg")
    words, (picture,) = boxes(page, "text:not(.number)"), boxes(page, ".paper")
    assert [word for word in words if not inside(word, picture)] == []
    pairs = [(a, b) for k, a in enumerate(words) for b in words[:k]]
    assert [(a, b) for a, b in pairs if overlap(a, b)] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_paper(look_at: Callable[..., Any], scheme: str) -> None:
    page = look_at("everything-4x8.svg", color_scheme=scheme)
    paper = brightness(page.locator(".paper").evaluate("e => getComputedStyle(e).fill"))
    assert (paper > 0.5) == (scheme == "light")
    for text in page.locator("text:not(.number)").all():
        assert contrast(brightness(text.evaluate("e => getComputedStyle(e).fill")), paper) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_stand_out_from_their_cells(look_at: Callable[..., Any], scheme: str) -> None:
    page = look_at("everything-4x8.svg", color_scheme=scheme)
    fills = "found => [...new Set(found.map(e => getComputedStyle(e).fill))]"
    (ink,) = page.locator(".number").evaluate_all(fills)
    for fill in page.locator(".cell").evaluate_all(fills):
        assert contrast(brightness(ink), brightness(fill)) >= 4.5


def brightness(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines define it."""
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)

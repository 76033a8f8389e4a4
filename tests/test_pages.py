"""Every page of the documentation runs as it is printed, from top to bottom.

The READMEs of the packages run with the tests of the packages, and the pages about frameworks with those of the
frameworks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import ROOT, pages, run


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", pages(frameworks=False), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)

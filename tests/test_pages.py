"""Every page of the documentation runs as printed, from top to bottom.

The pages about frameworks run with the tests of the frameworks.
"""

from itertools import chain
from pathlib import Path

import pytest

from blockpartition.__main__ import main
from gpipe._plan import _measure

from .pages import ROOT, blocks, pages, pages_of_processes, promises, run, run_in_processes


@pytest.mark.parametrize("page", pages(frameworks=False), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_measure, "SECONDS", 0.02)  # of each plan, whose seconds no page promises
    printed = run(page)
    if page.parent.name in ("blockpartition", "microbatch"):  # they show all that they print
        assert printed.splitlines() == "\n".join(chain.from_iterable(map(promises, blocks(page)))).splitlines()
    if page.parent.name == "profiler":
        assert "5 layers on cpu, micro-batch of 8 rows (chunks=8)" in printed


def test_the_readmes_of_the_packages_are_pages() -> None:
    assert {*ROOT.glob("packages/*/README.md")} <= {*pages(frameworks=False)}
    assert len(blocks(ROOT / "packages" / "streams" / "README.md")) == 3


def test_the_readme_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main(["3", "--costs", "4", "8", "15", "16", "23", "42"])
    assert capsys.readouterr().out in (ROOT / "packages" / "blockpartition" / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("page", pages_of_processes(frameworks=False), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_for_several_processes_runs_as_printed(page: Path, tmp_path: Path) -> None:
    run_in_processes(page, tmp_path)

"""The pages about frameworks run as they are printed, from top to bottom."""

from pathlib import Path

import pytest

from ..pages import ROOT, pages, pages_of_processes, run, run_in_processes

for needed in ("transformers", "lightning"):
    pytest.importorskip(needed, reason=f"{needed} is not installed; see nox -s frameworks")


@pytest.mark.filterwarnings("ignore")  # frameworks warn of themselves, and of machines without accelerators
@pytest.mark.parametrize("page", pages(frameworks=True), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library, sign in {"bitsandbytes": "BitsAndBytesConfig", "trl": "from trl "}.items():
        if sign in page.read_text(encoding="utf-8"):
            pytest.importorskip(library, reason=f"{library} is not installed; see nox -s frameworks")
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("page", pages_of_processes(frameworks=True), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_for_several_processes_runs_as_printed(page: Path, tmp_path: Path) -> None:
    run_in_processes(page, tmp_path)

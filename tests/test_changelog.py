"""Changelogs, and their fragments: one file per change since the last release."""

import re
from pathlib import Path

import pytest

from .pages import PACKAGES, ROOT

towncrier = pytest.importorskip("towncrier._shell", reason="no changelogs: towncrier is not installed")
testing = pytest.importorskip("click.testing")  # a dependency of towncrier

each_package = pytest.mark.parametrize("package", PACKAGES)


def build(folder: Path, how: str) -> testing.Result:
    settings = ["--config", str(ROOT / "pyproject.toml"), "--dir", str(folder)]
    return testing.CliRunner().invoke(towncrier.cli, ["build", *settings, how])


@each_package
def test_every_fragment_is_in_the_draft(package: str) -> None:
    folder = ROOT / "packages" / package
    draft = build(folder, "--draft")
    assert draft.exit_code == 0, draft.output
    for fragment in folder.glob("changelog.d/[!.]*"):
        assert "- " + "\n  ".join(fragment.read_text(encoding="utf-8").splitlines()) in draft.output


@each_package
def test_a_package_without_a_release_has_no_fragments(package: str) -> None:
    """Nobody has used what they changed or fixed: its changelog describes the first release."""
    folder = ROOT / "packages" / package
    headings = re.findall(r"^## .*", (folder / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) > 1 or not list(folder.glob("changelog.d/[!.]*"))

"""Fragments of changelogs: what the next release says of itself, a file for each change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .pages import ROOT

towncrier = pytest.importorskip("towncrier._shell", reason="no changelogs: towncrier is not installed")
testing = pytest.importorskip("click.testing")  # comes with it

PACKAGES = ("blockpartition", "microbatch", "streams", "profiler", "gpipe")
TYPES = ("removed", "changed", "added", "fixed")
HEAD, MARK, OLDER = "## 1.0 (unreleased)\n\n", "<!-- news -->\n", "- An older line.\n"
each_package = pytest.mark.parametrize("package", PACKAGES)

names = st.tuples(st.sampled_from("abcde"), st.sampled_from(TYPES)).map(".".join)
fragments = st.dictionaries(names, st.text("pipes `é`", min_size=3).filter(str.strip).map(str.strip))


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
def test_they_go_below_the_first_heading(package: str) -> None:
    before, mark, _ = (ROOT / "packages" / package / "CHANGELOG.md").read_text(encoding="utf-8").partition(MARK)
    assert mark
    assert before.count("\n## ") == 1


@settings(max_examples=20)
@given(fragments)
def test_each_becomes_a_line_by_type_and_nothing_else_changes(
    tmp_path_factory: pytest.TempPathFactory, fragments: dict[str, str]
) -> None:
    folder = package_with(tmp_path_factory.mktemp("packages"), fragments)
    built = build(folder, "--yes")
    assert built.exit_code == 0, built.output
    added = (folder / "CHANGELOG.md").read_text(encoding="utf-8").removeprefix(HEAD + MARK).removesuffix(OLDER)
    of_types = [{f"- {text}" for name, text in fragments.items() if name.endswith(each)} for each in TYPES]
    lines = iter(added.splitlines())
    assert [{next(lines) for _ in each} for each in of_types] == of_types
    assert list(lines) == []
    assert list((folder / "changelog.d").iterdir()) == []


def test_a_type_that_there_is_not_is_refused(tmp_path: Path) -> None:
    built = build(package_with(tmp_path, {"layers.improved": "Better."}), "--draft")
    assert built.exit_code != 0
    assert "layers.improved.md" in built.output


def package_with(folder: Path, fragments: dict[str, str]) -> Path:
    """A repository of one package with these fragments."""
    package = folder / "packages" / "one"
    (package / "changelog.d").mkdir(parents=True)
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "changelog.jinja", folder / "tools")
    (package / "CHANGELOG.md").write_text(HEAD + MARK + OLDER, encoding="utf-8")
    for name, text in fragments.items():
        (package / "changelog.d" / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    return package

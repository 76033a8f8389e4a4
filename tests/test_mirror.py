"""Tests mirror the sources: a folder of gpipe has its tests in the folder of its name."""

from pathlib import Path

GPIPE = Path(__file__).parents[1] / "packages" / "gpipe"
SOURCES, TESTS = GPIPE / "src" / "gpipe", GPIPE / "tests"


def folders(root: Path, pattern: str) -> set[str]:
    """The folders under ``root`` with such files, without a leading underscore."""
    return {each.name.lstrip("_") for each in root.iterdir() if each.is_dir() and any(each.glob(pattern))}


def modules() -> dict[str, set[str]]:
    """Map each module name, without leading underscores, to the folders that have it; "" is the top."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        inside = path.relative_to(SOURCES).parts
        found.setdefault(path.stem.lstrip("_"), set()).add(inside[0].lstrip("_") if len(inside) > 1 else "")
    return found


def test_folders_of_tests_mirror_sources() -> None:
    assert folders(SOURCES, "*.py") == folders(TESTS, "test_*.py")


def test_files_of_tests_mirror_modules() -> None:
    known = modules()
    lost = []
    for path in TESTS.rglob("test_*.py"):
        inside = path.relative_to(TESTS).parts
        folder = inside[0] if len(inside) > 1 else ""
        expected = known.get(path.stem.removeprefix("test_"), {folder})
        if folder not in expected:
            lost.append(f"{path.relative_to(TESTS)}: its module is in {sorted(expected)}")
    assert not lost

"""Prose does not get worse: in each folder, stilted phrases per 1000 words stay below a limit.

When a folder has improved, lower its limit. ``python -m tests.english FOLDER`` lists the phrases.
"""

import re
from pathlib import Path

import pytest

from .english import PHRASES, ROOT, Text, count, folders, report

FOLDERS = folders()
DEFAULT = 2.0
LIMITS = {
    "benchmarks": 2,
    "docs": 3,
    "docs/coming-from": 2,
    "docs/decisions": 1.5,
    "docs/examples": 3.5,
    "docs/howto": 1.5,
    "docs/pictures": 8,
    "docs/start": 2,
    "examples": 1.5,
    "packages/blockpartition": 1.5,
    "packages/blockpartition/src/blockpartition": 1.5,
    "packages/gpipe": 3,
    "packages/gpipe/src/gpipe": 3,
    "packages/gpipe/src/gpipe/_check": 2,
    "packages/gpipe/src/gpipe/_plan": 1.5,
    "packages/gpipe/src/gpipe/checkpoint": 2,
    "packages/gpipe/src/gpipe/distributed": 2,
    "packages/gpipe/src/gpipe/engine": 2,
    "packages/gpipe/src/gpipe/model": 2,
    "packages/gpipe/src/gpipe/module": 2.5,
    "packages/gpipe/src/gpipe/schedule": 4,
    "packages/gpipe/src/gpipe/timeline": 4,
    "packages/gpipe/src/gpipe/values": 1.5,
    "packages/gpipe/tests": 2.5,
    "packages/gpipe/tests/check": 4.5,
    "packages/gpipe/tests/checkpoint": 3,
    "packages/gpipe/tests/engine": 1,
    "packages/gpipe/tests/model": 1.5,
    "packages/gpipe/tests/module": 1,
    "packages/gpipe/tests/values": 2.5,
    "packages/microbatch": 1.5,
    "packages/microbatch/src/microbatch": 1.5,
    "packages/profiler/src/profiler": 1.5,
    "packages/streams/tests": 1.5,
    "tests": 1.5,
    "tests/frameworks": 2.5,
    "tests/simulated": 3,
}
"""Limits of folders with phrases; a few of them are right, or are names of cases."""

STILTED = {
    "of": "Of several, the first counts.",
    "what": "The sum is divided by what the loss returns.",
    "that of": "Gradients are those of the plain model.",
    "where": "The loss is NaN. Where all weights are 0, gradients are zeros.",
    "summary": '"""Whether the loss was counted."""',
    "also if": "Activations are freed, also if the graph is retained.",
    "other": "The micro-batch has another shape.",
    "people": "# so that nobody waits",
    "refused": "a scripted module is refused",
    "per": "Weights are cast once a step.",
    "again": "The forward is computed again.",
    "in place": "A copy takes its place.",
    "before": "# the output of the stage before",
    "beside": "The loss is computed beside the metrics.",
    "whole": "A loss of all rows.",
    "inside of": "A tensor outside of the pipe.",
    "data": "A model without data.",
}
PLAIN = (
    "Gradients match the plain model's.",
    '"""Return whether the loss was counted."""',
    "If all weights are 0, gradients are zeros, even if the graph is retained.",
    "# The stage before it knows what to do in the other case; of course, each layer runs once per step.",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_has_few_stilted_phrases(folder: str) -> None:
    found = count(FOLDERS[folder])
    allowed = 1 + LIMITS.get(folder, DEFAULT) * found.words / 1000
    assert found.phrases <= allowed, f"{found.rate:.1f} per 1000 words:\n{report(FOLDERS[folder])}"


def test_limits_are_of_existing_folders() -> None:
    assert {*LIMITS} <= {*FOLDERS}


@pytest.mark.parametrize("name", PHRASES)
def test_phrase_is_found(name: str) -> None:
    assert PHRASES[name][0].search(STILTED[name])


@pytest.mark.parametrize("text", PLAIN)
def test_plain_english_is_not_counted(text: str) -> None:
    assert [*Text(Path(), 1, text).phrases()] == []


def test_strings_comments_and_pages_are_read(tmp_path: Path) -> None:
    program, page = tmp_path / "program.py", tmp_path / "page.md"
    program.write_text('x = "nobody"\n# one of\n# what is # counted\nraise ValueError(f"{x} is what is \'told\'")\n')
    page.write_text("All rows\n\n```python\n# all rows\n\n# all rows\n```\n\nand all\nrows.\n")
    assert (count([program]).phrases, count([page]).phrases) == (2, 1)


def test_names_of_tests_are_short() -> None:
    too_long = dict[str, list[str]]()
    for folder, paths in FOLDERS.items():
        names = [
            name for path in paths for name in re.findall(r"^ *def test_(\w+)", path.read_text("utf-8"), re.MULTILINE)
        ]
        long = [name for name in names if len(name.split("_")) > 8]
        if long:
            too_long[folder] = long
    assert not too_long, f"more than eight words: {too_long}"


def test_folders_include_the_repository() -> None:
    assert ROOT / "noxfile.py" in FOLDERS["."]

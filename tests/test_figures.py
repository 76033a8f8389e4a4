"""Figures in sentences match the tables written by benchmarks."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
BLOCKS = re.compile(r"<!-- begin: (\S+) -->(.*?)<!-- end: \S+ -->", re.DOTALL)
FIGURES = re.compile(r"(?<![\w.])(?<![tT]orch )(?<!Python )(?<!CUDA )(?<!NCCL )\d+\.\d+(?![\w+]|\.\d)")
RATIO = "ours / torchgpipe's"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: str) -> dict[str, str]:
    """Return the blocks that benchmarks wrote into a page, by table name."""
    return dict(BLOCKS.findall(text_of(ROOT / "docs" / "benchmarks" / f"{page}.md")))


def rows(block: str) -> list[dict[str, str]]:
    """The lines of a table, by its headings."""
    lines = [line.strip("|").split("|") for line in block.splitlines() if line.startswith("|")]
    heading, _, *body = [[cell.strip() for cell in cells] for cells in lines]
    return [dict(zip(heading, cells, strict=True)) for cells in body]


def in_tables(text: str) -> set[str]:
    tables = [line for line in text.splitlines() if line.startswith("|")]
    return set(FIGURES.findall("\n".join([*tables, *(block for _, block in BLOCKS.findall(text))])))


def in_sentences(text: str) -> set[str]:
    """Return figures outside tables, code, and lines on when and how a table was made."""
    text = re.sub(r"```.*?```|`[^`]*`", "", BLOCKS.sub("", text), flags=re.DOTALL)
    return {figure for line in text.splitlines() if not line.startswith(("|", "*")) for figure in FIGURES.findall(line)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_tell_figures_of_the_tables(page: Path) -> None:
    """Sentences use the tables of their page; the index page may use any."""
    tables = PAGES if page.stem == "index" else [page]
    assert in_sentences(text_of(page)) <= set().union(*(in_tables(text_of(each)) for each in tables))


def readme(row: str) -> list[str]:
    [line] = re.findall(rf"^\| {re.escape(row)}.*", text_of(ROOT / "README.md"), re.MULTILINE)
    return FIGURES.findall(line)


def test_readme_quotes_range_of_linear_layers() -> None:
    tables = [block for name, block in blocks("pipeline").items() if re.fullmatch(r"w-\d+-m\d+", name)]
    ratios = [row[RATIO].split()[0] for block in tables for row in rows(block) if row[RATIO] != "–"]
    assert readme("time of a training step of linear layers / torchgpipe's") == [min(ratios), max(ratios)]


def test_the_readme_has_the_figures_of_one_gpu() -> None:
    found = {
        row["checkpoint"]: row["time / the loop's"].split()[0]
        for row in rows(blocks("cuda")["cuda-time"])
        if row["D = B"] == "4096" and row["way"] == "one stage"
    }
    assert readme("time of a training step of large linear layers on one H200") == [found["never"], found["always"]]


KINDS = {"bfloat16, trained": (2, 2), "bfloat16, LoRA": (2, 0), "4 bits, LoRA": (0.55, 0)}
"""Rows of ``howto/offload.md``, and the bytes per parameter moved to the device and back."""


def test_offload_page_matches_prediction() -> None:
    """The prediction is the function printed in the page."""
    page = text_of(ROOT / "docs" / "howto" / "offload.md")
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, scope)
    for row in rows(page):
        parameters, (there, back) = 1e9 * int(row["model"].split()[0]), KINDS[row["weights"]]
        for memory in (24, 80):
            needed = max(4, math.ceil((2 * there + back) * parameters / (0.6e9 * memory)))
            assert int(row[f"stages in {memory} GB"]) == needed
        stages = int(row["stages in 24 GB"])
        for bandwidth in (12, 25, 50):
            least = int(row[f"{bandwidth} GB/s"].replace(",", ""))
            shares = [
                scope["busy"](stages, parameters, there, back, tokens, 1e9 * bandwidth)
                for tokens in (least - 500, least)
            ]
            assert shares[0] < 0.9 <= shares[1], row

"""The benchmarks measure the same work, report failures by name, and write where they should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need rich")
pytest.importorskip("tabulate", reason="the benchmarks need tabulate")

from benchmarks import calls, workloads
from benchmarks.contenders import LOOP, TWO_LOOPS, Contender, Task, contenders
from benchmarks.programs import build, named_results
from benchmarks.report import Table, write

SMALL = ("W 64", "U-Net", "ResNet")
FIELD = contenders(Task("W 64", 4), quarters=True)
OURS = [one for one in FIELD if one.library == "gpipe" and not one.keep_memory]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A program sets its own number of threads, for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results(contender: Contender, task: Task) -> dict[str, torch.Tensor]:
    program = build(contender, task)
    return named_results(program, program.run())


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert wanted
    for name, tensor in wanted.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4 * largest)


class TestSameWork:
    @pytest.mark.parametrize("workload", SMALL)
    def test_ours_have_the_gradients_of_the_loop(self, workload: str) -> None:
        task = Task(workload, 4)
        wanted = results(LOOP, task)
        quarters = workloads.by_name(workload).quarters is not None
        for contender in [one for one in OURS if quarters or one.schedule != "interleaved"] + [TWO_LOOPS]:
            assert_same(results(contender, task), wanted)


class TestCalls:
    def test_counts_are_the_same_every_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "MICROBATCHES", 1)
        assert calls.count_ours() == calls.count_ours()


class TestTables:
    def table(self) -> Table:
        table = Table("page.md", "sizes", "In a unit", ("what", "how much"))
        table.add("a | b", 1)
        table.add("c", f"– {table.note('it died: <unknown>')}")
        return table

    def test_words_around_the_markers_stay_and_writing_again_changes_nothing(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("# Before\n\n<!-- begin: sizes -->\nold\n<!-- end: sizes -->\n\nAfter.\n")
        write(self.table(), "today", tmp_path)
        once = page.read_text()
        write(self.table(), "today", tmp_path)
        assert page.read_text() == once
        assert once.startswith("# Before\n\n<!-- begin: sizes -->\n\nIn a unit\n")
        assert once.endswith("*today*\n\n<!-- end: sizes -->\n\nAfter.\n")
        assert "old" not in once

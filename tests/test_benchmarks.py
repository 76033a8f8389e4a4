"""The benchmarks measure the same work, tell who fails, and write where they should."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need rich")
pytest.importorskip("tabulate", reason="the benchmarks need tabulate")

from benchmarks import compare, handed, workloads
from benchmarks.contenders import LOOP, TWO_LOOPS, Contender, Task, contenders, rival
from benchmarks.handed import Stage, connect
from benchmarks.match import Court, Rules
from benchmarks.programs import build, named_results, slices
from benchmarks.report import PAGES, Table, markdown, write
from benchmarks.targets import TARGETS, Target

SMALL = ("W 64", "U-Net", "ResNet")
OURS = [one for one in contenders(Task("W 64", 4), quarters=True) if one.library == "gpipe"]


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

    @pytest.mark.parametrize("workload", SMALL)
    @pytest.mark.parametrize("checkpoint", ["never", "always"])
    def test_torchgpipe_has_the_gradients_of_the_loop(self, workload: str, checkpoint: str) -> None:
        pytest.importorskip("torchgpipe")
        task = Task(workload, 4)
        assert_same(results(Contender("torchgpipe", checkpoint), task), results(LOOP, task))

    @pytest.mark.parametrize("contender", [TWO_LOOPS, Contender("plain"), Contender("gpipe")], ids=lambda one: one.name)
    def test_forward_alone_gives_the_same_output(self, contender: Contender) -> None:
        task = Task("W 64", 4, training=False)
        assert_same(results(contender, task), results(LOOP, task))

    def test_skips_handed_on_between_stages_are_the_skips_of_the_model(self) -> None:
        workload, task = workloads.by_name("U-Net"), Task("U-Net", 1)
        torch.manual_seed(0)
        stages = [Stage(layers) for layers in slices(workload.model(handed), workload.balance)]
        connect(stages)
        torch.manual_seed(1)
        crossing = stages[0](workload.batch())
        workload.loss(stages[1](*crossing)).backward()
        found = {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
        assert stages[0].outgoing == ["level0", "level1", "level2"]
        assert_same(found, results(LOOP, task))

    def test_an_unknown_workload_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"workload must be one of W 64, .*; got 'V'"):
            workloads.by_name("V")


class TestRivals:
    def test_as_much_is_recomputed_on_both_sides(self) -> None:
        field = contenders(Task("W 64", 8), quarters=True)
        for ours in OURS:
            for library in ("torchgpipe", "fairscale", "distributed"):
                other = rival(ours, library, field)
                assert other is None or other.checkpoint == ours.checkpoint

    def test_a_schedule_meets_itself(self) -> None:
        field = contenders(Task("W 64", 8), quarters=True)
        assert rival(Contender("gpipe", schedule="1f1b"), "distributed", field) == Contender(
            "distributed", schedule="1f1b"
        )
        assert rival(Contender("gpipe"), "distributed", field) == Contender("distributed", schedule="fill_drain")


class TestCourt:
    def test_who_fails_is_out_and_the_others_go_on(self) -> None:
        stranger = Contender("nobody knows")
        with Court(Rules(rounds=2, turn=0.001, limit=100)) as court:
            outcomes = court.play(Task("W 64", 4), [LOOP, stranger], lambda contender: True)
        assert len(outcomes[LOOP].seconds) == 2
        assert outcomes[LOOP].difference == 0
        assert outcomes[stranger].failure == "KeyError: 'nobody knows'"


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

    def test_marks_of_the_language_are_written_as_words(self) -> None:
        text = markdown(self.table(), "today")
        assert "a \\| b" in text
        assert "- (1) it died: &lt;unknown>" in text

    def test_a_page_without_the_place_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "page.md").write_text("nothing\n")
        with pytest.raises(ValueError, match=r"page\.md must have one place for the table 'sizes'"):
            write(self.table(), "today", tmp_path)

    def test_each_workload_has_its_place_in_the_pages(self) -> None:
        options = argparse.Namespace(workload=None, quick=False)
        for task in compare.tasks(options):
            page, name = compare.place(task)
            assert (PAGES / page).read_text(encoding="utf-8").count(f"<!-- begin: {name} -->") == 1


class TestTargets:
    def test_the_worst_counts(self) -> None:
        low, high = Target("low", "x", 1, "<"), Target("high", "x", 1, "≥")
        assert low.worst([(0.5, "a"), (1.0, "b")]) == (1.0, "b")
        assert high.worst([(0.5, "a"), (1.0, "b")]) == (0.5, "a")
        assert (low.met(1.0), high.met(1.0)) == (False, True)

    def test_each_has_a_name_of_its_own(self) -> None:
        assert len({target.measure for target in TARGETS}) == len(TARGETS)

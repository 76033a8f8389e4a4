"""The benchmarks measure the same work, report failures by name, and write where they should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need rich")
pytest.importorskip("tabulate", reason="the benchmarks need tabulate")

from benchmarks import calls, compare, distributed, workloads
from benchmarks.contenders import LOOP, TWO_LOOPS, Contender, Task, contenders, rivals
from benchmarks.distributed import SkipRelay, connect
from benchmarks.match import Match, Outcome, Rules
from benchmarks.programs import build, named_results, slices
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

    def test_the_skips_that_stages_relay_are_the_skips_of_the_model(self) -> None:
        workload, task = workloads.by_name("U-Net"), Task("U-Net", 1)
        torch.manual_seed(0)
        stages = [SkipRelay(layers) for layers in slices(workload.model(distributed), workload.balance)]
        connect(stages)
        torch.manual_seed(1)
        crossing = stages[0](workload.batch())
        workload.loss(stages[1](*crossing)).backward()
        found = {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
        assert stages[0].outgoing == ["level0", "level1", "level2"]
        assert_same(found, results(LOOP, task))


class TestRivals:
    @pytest.mark.parametrize("workload", compare.RANKS_WORKLOADS)
    def test_ranks_meet_torchs_with_the_same_cuts(self, workload: str) -> None:
        contenders = compare.field_of_ranks(Task(workload, 8))
        for ours in [one for one in contenders if one.library == "ranks"]:
            (theirs,) = rivals(ours, "distributed", contenders)
            cuts = [distributed.cuts(workloads.by_name(workload), one) for one in (ours, theirs)]
            assert cuts[0] == cuts[1]

    def test_ours_is_compared_with_the_faster_of_both(self) -> None:
        ours, slow = Contender("gpipe"), Contender("torchgpipe")
        outcomes = {
            LOOP: Outcome([4.0, 4.0]),
            ours: Outcome([2.0, 1.0]),
            slow: Outcome([8.0, 8.0]),
            replace(slow, threads=1): Outcome([4.0, 4.0]),
        }
        assert compare.against(ours, "torchgpipe", outcomes) == [0.5, 0.25]
        outcomes[replace(slow, threads=1)] = Outcome(failure="it died")
        assert compare.against(ours, "torchgpipe", outcomes) == [0.25, 0.125]


class TestMatch:
    @pytest.mark.long  # an interpreter for each contender
    def test_a_contender_that_fails_is_named_and_the_others_go_on(self) -> None:
        stranger = Contender("nobody knows")
        with Match(Rules(rounds=2, turn=0.001, limit=100)) as match:
            outcomes = match.play(Task("W 64", 4), [LOOP, stranger], lambda contender: True)
        loop = outcomes[LOOP]
        assert len(loop.seconds) == len(loop.faults) == 2
        assert (loop.difference, loop.threads) == (0, 1)
        assert outcomes[stranger].failure == "KeyError: 'nobody knows'"


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

    def test_a_page_without_the_markers_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "page.md").write_text("nothing\n")
        with pytest.raises(ValueError, match=r"page\.md must have the markers of the table 'sizes' once"):
            write(self.table(), "today", tmp_path)

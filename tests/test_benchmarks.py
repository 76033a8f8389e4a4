"""The benchmarks measure the same work, report failures by name, and write where they should."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need rich")
pytest.importorskip("tabulate", reason="the benchmarks need tabulate")

from benchmarks import calls, compare, distributed, workloads
from benchmarks.contenders import LOOP, PEERS, TWO_LOOPS, Contender, Task, contenders, rivals
from benchmarks.distributed import SkipRelay, connect
from benchmarks.match import Match, Outcome, Rules
from benchmarks.programs import build, named_results, slices
from benchmarks.report import PAGES, Table, markdown, write

import gpipe

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

    def test_an_inline_step_has_the_same_gradients_and_notes_what_its_actions_took(self) -> None:
        task = Task("W 64", 4)
        program = build(Contender("inline", schedule="1f1b"), task)
        found = named_results(program, program.run())
        assert_same(found, results(LOOP, task))
        costs = program.costs()
        assert costs is not None
        assert costs[0].keys() == {(j, kind) for j in range(2) for kind in ("forward", "backward")}

    def test_every_training_step_ends_with_the_optimizer(self) -> None:
        for contender in (LOOP, TWO_LOOPS, Contender("plain"), *OURS):
            program = build(contender, Task("W 64", 4))
            before = [p._version for p in program.module.parameters()]
            program.run()
            assert all(p._version > was for p, was in zip(program.module.parameters(), before, strict=True))

    def test_only_the_contenders_that_ask_for_it_change_the_number_of_threads(self) -> None:
        torch.set_num_threads(3)
        build(Contender("gpipe"), Task("W 64", 4))
        assert torch.get_num_threads() == 3
        build(LOOP, Task("W 64", 4))
        assert torch.get_num_threads() == 1

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

    def test_an_unknown_workload_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"workload must be one of W 64, .*; got 'V'"):
            workloads.by_name("V")


class TestRivals:
    @pytest.mark.parametrize("ours", OURS, ids=lambda one: one.name)
    def test_as_much_is_recomputed_on_both_sides(self, ours: Contender) -> None:
        for library in PEERS:
            for other in rivals(ours, library, FIELD):
                assert (other.library, other.checkpoint) == (library, ours.checkpoint)

    def test_a_schedule_meets_itself(self) -> None:
        step = Contender("gpipe", schedule="1f1b")
        assert rivals(step, "distributed", FIELD) == [Contender("distributed", schedule="1f1b")]
        assert rivals(Contender("gpipe"), "distributed", FIELD) == [Contender("distributed", schedule="fill_drain")]

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

    def test_a_trace_sees_calls_on_threads_that_start_meanwhile(self) -> None:
        pipe = gpipe.GPipe(torch.nn.Sequential(torch.nn.Identity()), [1], devices=["cpu"])
        trace = calls.Trace.of(lambda: pipe(torch.ones(2, 1)), calls.OURS)
        pipe.close()
        assert len(trace.threads) == 2

    def test_cycles_are_groups_that_reach_each_other(self) -> None:
        graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f"}}
        assert calls.cycles(graph) == [{"a", "b", "c"}]


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

    def test_a_page_without_the_markers_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "page.md").write_text("nothing\n")
        with pytest.raises(ValueError, match=r"page\.md must have the markers of the table 'sizes' once"):
            write(self.table(), "today", tmp_path)

    def test_each_workload_has_its_markers_in_a_page(self) -> None:
        options = argparse.Namespace(workload=None, quick=False)
        for task in compare.tasks(options):
            page, name = compare.place(task)
            assert (PAGES / page).read_text(encoding="utf-8").count(f"<!-- begin: {name} -->") == 1

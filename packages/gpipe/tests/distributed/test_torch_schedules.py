"""Schedules match ``torch.distributed.pipelining``: its ranks and our workers run the same steps in the same order."""

from typing import Any

import pytest

from gpipe.schedule import Schedule, looped_placement, named, v_placement

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def theirs(name: str, microbatches: int, stages: int, ranks: int) -> Schedule:
    """Return the steps of torch's schedule ``name``, without stages and process groups."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", exc_type=ImportError)
    rounds = max(1, microbatches // ranks)
    try:
        schedule = object.__new__(getattr(pipelining, name))
        vars(schedule).update(
            pp_group_size=ranks,
            n_local_stages=stages // ranks,
            num_stages=stages,
            number_of_rounds=rounds,
            microbatches_per_round=microbatches // rounds,
            _stages=[None] * (stages // ranks),
            _num_stages=stages,
            _n_microbatches=microbatches,
        )
        lines = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
        return Schedule.parse("\n".join(" ".join(map(written, filter(None, line))) for line in lines))
    except AttributeError as error:
        pytest.skip(f"this version of torch plans schedules differently: {error}")


def written(action: Any) -> str:
    """Return an action in our notation. An overlapped forward and backward are written in sequence."""
    if action.sub_actions:
        return " ".join(map(written, action.sub_actions))
    return f"{LETTERS[action.computation_type.name]}{action.microbatch_index}@{action.stage_index}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 3])
class TestSteps:
    @pytest.mark.parametrize(
        ("name", "other"),
        [("looped_bfs", "ScheduleLoopedBFS"), ("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble")],
    )
    @pytest.mark.parametrize("loops", [2, 3])
    def test_in_loops(self, name: str, other: str, loops: int, rounds: int, ranks: int) -> None:
        stages = loops * ranks
        ours = named(name, rounds * ranks, looped_placement(stages, ranks))
        assert ours == theirs(other, rounds * ranks, stages, ranks)

    @pytest.mark.parametrize(("name", "other"), [("zbv", "ScheduleZBVZeroBubble"), ("dualpipev", "ScheduleDualPipeV")])
    def test_in_a_v(self, name: str, other: str, rounds: int, ranks: int) -> None:
        ours = named(name, rounds * ranks, v_placement(2 * ranks))
        assert ours == theirs(other, rounds * ranks, 2 * ranks, ranks)

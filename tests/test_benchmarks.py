"""The benchmarks measure the same work."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need rich")
pytest.importorskip("tabulate", reason="the benchmarks need tabulate")

from benchmarks import workloads
from benchmarks.contenders import LOOP, TWO_LOOPS, Contender, Task, contenders
from benchmarks.programs import build, named_results

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


@pytest.mark.parametrize("workload", SMALL)
def test_ours_have_the_gradients_of_the_loop(workload: str) -> None:
    task = Task(workload, 4)
    wanted = results(LOOP, task)
    quarters = workloads.by_name(workload).quarters is not None
    for contender in [one for one in OURS if quarters or one.schedule != "interleaved"] + [TWO_LOOPS]:
        assert_same(results(contender, task), wanted)

"""A plan after a step that ran out of memory: it asks less of that device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe import Infeasible, Plan, plan
from gpipe._plan._after import read_after

from ..engine.test_oom import Limited
from ..layers import rows
from .test_plan import CPUS, ROWS, made, model

pytestmark = pytest.mark.usefixtures("one_thread")


def failed(found: Plan, stage: int) -> torch.OutOfMemoryError:
    """The error of a step with the plan ``found``, in which memory runs out on ``stage``."""
    layers = copy.deepcopy(model()).double()
    layers[sum(found.balance[: stage + 1]) - 1].append(Limited(0))
    pipe = found.build(layers)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.step(rows(ROWS), rows(ROWS), loss_fn=F.mse_loss, schedule=found.schedule)
    pipe.close()
    return caught.value


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("checkpoint", [None, "except_last"])
def test_the_next_plan_asks_less_of_that_device(stage: int, checkpoint: str | None):
    """Also again and again, until nothing fits."""
    ways: dict[str, Any] = {"schedule": ["1f1b", "fill_drain"], "checkpoint": checkpoint}
    found, error = made(**ways), None
    for _ in range(40):
        asked = found.predicted.bytes[stage].total
        after = failed(found, stage)
        try:
            found = made(after=after, **ways)
        except Infeasible as raised:
            error = raised
            break
        assert found.predicted.bytes[stage].total <= found.memory[stage] == round(0.9 * asked)
        assert found.memory[1 - stage] is None
        assert f"device {stage} (cpu) counts as" in found.notes[1]
    assert error is not None
    assert error.device == stage
    assert "after a step that ran out of memory" in error.__notes__[0]


def test_a_stage_that_was_not_expected_to_fit_tells_nothing_new():
    error = failed(made(chunks=1, checkpoint="never"), 0)
    assert made(memory="3kB", after=error).memory == (3000, 3000)


def test_an_error_survives_pickling():
    error = failed(made(), 1)
    assert read_after(pickle.loads(pickle.dumps(error)), CPU * 2, 4) == read_after(error, CPU * 2, 4)


CPU = [torch.device("cpu")]
CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1 GiB is free."


def test_the_text_of_cuda_names_the_device():
    shortage = read_after(torch.OutOfMemoryError(TEXT), CUDA, 4)
    assert shortage is not None
    assert shortage.device == 1


def test_on_one_device_nothing_need_be_named():
    found = made_on_one(memory="20kB", after=torch.OutOfMemoryError("out of memory"))
    assert found.memory == (18000,)


def made_on_one(**options: Any) -> Plan:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return plan(layers, torch.zeros(8, 3), ["cpu"], calibrate=False, chunks=2, **options)


@pytest.mark.parametrize(
    ("after", "kind", "says"),
    [
        ("out of memory", TypeError, "got str"),
        (ValueError("wrong"), ValueError, "memory ran out"),
        (torch.OutOfMemoryError("somewhere"), ValueError, "does not say where"),
        (torch.OutOfMemoryError(TEXT), ValueError, "is of cuda:1"),
    ],
)
def test_other_errors_are_refused(after: Any, kind: type[Exception], says: str):
    with pytest.raises(kind, match=f"after: .*{says}"):
        plan(model(), torch.zeros(ROWS, 3), CPUS, after=after)


def test_an_error_of_another_model_is_refused():
    error = failed(made(), 1)
    with pytest.raises(ValueError, match="at least 4 layers; this one has 2"):
        plan(model()[:2], torch.zeros(ROWS, 3), CPUS, after=error)


def test_what_nobody_knows_has_to_be_given():
    with pytest.raises(ValueError, match="give memory="):
        made_on_one(after=torch.OutOfMemoryError("out of memory"))


def test_devices_that_are_not_there_run_out_of_no_memory():
    with pytest.raises(ValueError, match="after: "):
        plan(model(), torch.zeros(ROWS, 3), "2x8GB", after=torch.OutOfMemoryError(TEXT))

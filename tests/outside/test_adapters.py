"""Adapters of PEFT on small models in a pipe: the numbers of the adapted model, whatever way they are used."""

from contextlib import closing
from typing import Any

import pytest
import torch

from gpipe import GPipe
from microbatch import Entries

from ..own_forward import CHUNKS, EQUAL, STAGES, NotComparableError, outcomes, worst
from .adapters import LAYERS, ROWS, Adapter, case, made, names

pytestmark = pytest.mark.filterwarnings("ignore")
ONE_CALL = r"registers a hook on .* and removes it before it returns"


@pytest.mark.parametrize(("name", "model"), [*names()])
def test_adapter_matches_plain_model(name: str, model: str) -> None:
    try:
        found = outcomes(case(name, model))
    except NotComparableError as error:
        pytest.skip(str(error))
    assert worst(found) == EQUAL, found


def piped(model: Any, **options: Any) -> Any:
    blocks = [name for name, _ in model.named_modules() if name.endswith(".blocks")]
    return closing(GPipe(model, devices=["cpu"] * STAGES, chunks=CHUNKS, blocks=blocks, **options))


@pytest.mark.parametrize("kind", ["Lora", "Road"])
def test_an_adapter_for_each_row_is_refused(kind: str) -> None:
    """PEFT passes it to the layers by hooks that exist during a call."""
    settings = {**LAYERS, **({"group_size": 2} if kind == "Road" else {})}
    model, x = made(Adapter(kind, settings), "dense")
    model.add_adapter("other", model.peft_config["default"])
    chosen = ["default", "other", "__base__"] * (ROWS // 3)
    made_pipe = piped(model.eval(), in_spec={"adapter_names": Entries()})
    with made_pipe as pipe, torch.no_grad(), pytest.raises(RuntimeError, match=ONE_CALL):
        pipe(x=x, adapter_names=chosen)


def test_an_adapter_of_tasks_is_refused() -> None:
    settings = {"target_modules": ["down"], "r": 2, "n_tasks": 3, "n_skills": 2}
    model, x = made(Adapter("Poly", settings), "attended")
    with piped(model.base_model.eval()) as pipe, torch.no_grad(), pytest.raises(RuntimeError, match=ONE_CALL):
        pipe(x=x, task_ids=torch.arange(ROWS) % 3)

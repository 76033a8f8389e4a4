"""Models on meta are loaded part by part, and raise if they would have to run."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, check, plan
from gpipe.balance import balance_by_time

from .trunks import Model, batch, pair


def test_in_one_line_and_with_copies() -> None:
    _, plain = pair(others=2, token=True)
    with torch.device("meta"):
        model = Model(others=2, token=True).double()
    pipe = GPipe(model, devices=["cpu"] * 3, chunks=2, init=plain.state_dict())
    assert len(pipe.balance) == 3
    for each in (pipe, copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        torch.testing.assert_close(each(**batch())["logits"], plain(**batch())["logits"])
        torch.testing.assert_close(dict(each.state_dict()), dict(plain.state_dict()))


class Owner(Model):
    """Initializes its modules like Hugging Face models, including modules inside other layers."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Owner):
            nn.init.constant_(module.embed.weight, 2.0)
            nn.init.constant_(module.middle.weight, 3.0)
            nn.init.constant_(module.factor, 5.0)
        for name, buffer in module.named_buffers(recurse=False):
            nn.init.constant_(buffer, 7.0 if name == "shift" else 8.0)


def test_computed_buffers() -> None:
    with torch.device("meta"):
        model = Owner().double()
        model.body.blocks[1].register_buffer("computed", torch.ones(2), persistent=False)

    pipe = GPipe(model, devices=["cpu"] * 2, init=Model().state_dict())
    assert pipe(**batch())["logits"].isfinite().all()
    assert model.body.blocks[1].computed.unique().tolist() == [8.0]
    assert model.body.blocks[1].shift.unique().tolist() == [1.0]


RUNS: dict[str, Callable[[nn.Sequential, Tensor], object]] = {
    "plan": lambda model, x: plan(model, x, ["cpu", "cpu"]),
    "check": lambda model, x: check(model, x),
    "balance_by_time": lambda model, x: balance_by_time(2, model, x),
}


@pytest.mark.parametrize("what", RUNS)
def test_running_meta_model_raises(what: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=f"{what} runs the model, which is on 'meta' and has no data; pass a materialized model"
    ):
        RUNS[what](model, torch.ones(4, 2))

"""Models that have no data are flattened by their shapes, and refused where their values would be refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, check, flatten, plan
from gpipe.balance import balance_by_time
from gpipe.simulate import simulate, stage_costs
from profiler import profile

from .test_flatten import Model, Told, batch, each_refusal


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A model without data, and one with."""
    with torch.device("meta"):
        model = Model(**options).double()
    torch.manual_seed(1)
    return model, Model(**options).double()


@each_refusal
def test_what_is_refused_with_data_is_refused_without(told: Any, named: str) -> None:
    with torch.device("meta"):
        model = Told(told)
    with pytest.raises(ValueError, match=named):
        flatten(model, torch.randn(2, 2))


def test_in_one_line_and_with_copies() -> None:
    model, plain = pair(others=2, token=True)
    pipe = GPipe(model, devices=["cpu"] * 3, chunks=2, sample=batch(2), init=plain.state_dict())
    assert len(pipe.balance) == 3
    for each in (pipe, copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        torch.testing.assert_close(each(**batch()), plain(**batch())["logits"])
        torch.testing.assert_close(dict(each.state_dict()), dict(plain.state_dict()))
    assert all(buffer.isnan().all() for name, buffer in pipe.named_buffers() if name == "end.net.token")


class Owner(Model):
    """Initialises its modules as models of Hugging Face do, also those that are in other layers."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Owner):
            nn.init.constant_(module.embed.weight, 2.0)
            nn.init.constant_(module.middle.weight, 3.0)
            nn.init.constant_(module.factor, 5.0)
        for name, buffer in module.named_buffers(recurse=False):
            nn.init.constant_(buffer, 7.0 if name == "shift" else 8.0)


def test_computed_buffers_of_flattened_models() -> None:
    with torch.device("meta"):
        model = Owner().double()
        model.body.blocks[1].register_buffer("computed", torch.ones(2), persistent=False)

    pipe = GPipe(model, [2, 3], devices=["cpu"] * 2, sample=batch(2), init=Model().state_dict())
    assert pipe(**batch()).isfinite().all()
    assert model.body.blocks[1].computed.unique().tolist() == [8.0]
    assert model.body.blocks[1].shift.unique().tolist() == [1.0]


def test_a_profile_of_a_model_without_data_tells_the_bytes_of_stages() -> None:
    model, plain = pair(others=2)
    found, expected = (
        profile(flatten(model, batch(2)), batch(2)),
        profile(flatten(plain, batch(2)), batch(2), device="cpu"),
    )
    assert found.costs("saved_bytes") == expected.costs("saved_bytes")
    blind, timed = (simulate("1f1b", stage_costs(each, [3, 2, 3]), microbatches=6) for each in (found, expected))
    assert blind.peak_bytes == timed.peak_bytes


RUNS: dict[str, Callable[[nn.Sequential, Tensor], object]] = {
    "plan": lambda model, x: plan(model, x, ["cpu", "cpu"]),
    "check": lambda model, x: check(model, x),
    "balance_by_time": lambda model, x: balance_by_time(2, model, x),
}


@pytest.mark.parametrize("what", RUNS)
def test_what_runs_a_model_says_that_it_has_no_data(what: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"{what} runs the model, which is on 'meta' and has no data; give it one"):
        RUNS[what](model, torch.ones(4, 2))

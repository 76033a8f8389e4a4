"""Models of Hugging Face over several processes: as in one, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packages.gpipe.tests.worlds import World
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpipe import GPipe
from gpipe.distributed import Rank, RemoteError

from .labelled import CASES, PACKED, batch_of, made

IN_ONE = partial(GPipe, devices=["cpu"] * 2)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_match_one(world: World, name: str):
    """Batches are padded, unpadded or packed."""
    world.run(_expect_as_one, name)


def _expect_as_one(name: str) -> None:
    rank, one = (_pipe(make, name) for make in (Rank, IN_ONE))
    own, every = ([name for name, _ in pipe.named_parameters(remove_duplicate=False)] for pipe in (rank, one))
    assert own == [name for name in every if name in own]  # some, in the model's order
    assert every == [name for name, _ in _model(name).named_parameters(remove_duplicate=False)]
    # Micro-batches with and without padding differ in how the blocks are called.
    _expect_steps_as_one(name, rank, one, ["padded", "unpadded"])
    state = {name: value.clone() for name, value in rank.state_dict().items()}
    assert state.keys() <= _model(name).state_dict().keys()
    again = _pipe(Rank, name)
    again.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    output, whole = rank.eval()(**batch_of(name, 8, "padded")), one.eval()(**batch_of(name, 8, "padded"))
    if dist.get_rank() == 1:
        for key, value in whole.items():
            torch.testing.assert_close(output[key], value)
    one.close()
    if name in PACKED:
        rank, one = (_pipe(make, name) for make in (Rank, IN_ONE))
        _expect_steps_as_one(name, rank, one, ["packed"])
        one.close()


def _pipe(make: Callable[..., Any], name: str) -> Any:
    return make(_model(name), sample=batch_of(name, 2, "unpadded"), chunks=4, checkpoint="always")


def _expect_steps_as_one(name: str, rank: Rank, one: GPipe, kinds: list[str]) -> None:
    optimizers = [torch.optim.AdamW(pipe.parameters(), 1e-3) for pipe in (rank, one)]
    counted = {"num_items_in_batch": 100} if name in ("GPT-2", "Llama", "OPT") else {}
    for seed, kind in enumerate(kinds):
        batch = {**batch_of(name, 8, kind), **(counted if seed else {})}
        losses = []
        for pipe in (rank, one):
            torch.manual_seed(seed)
            losses.append(pipe.train(pipe.training).step(**batch))
        assert torch.equal(*losses)
        assert rank.last_schedule.name == one.last_schedule.name
        expected = dict(one.named_parameters(remove_duplicate=False))
        for key, parameter in rank.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=0, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_last_process_returns_complete_output(world: World):
    world.run(_expect_balanced)


def _expect_balanced() -> None:
    batch = batch_of("Mixtral", 8, "padded")
    model = made(CASES["Mixtral"][0])[0]
    model.config.output_router_logits = model.config.output_hidden_states = True
    expected = model(**batch)
    rank = Rank(model, chunks=4)
    output = rank(**batch)
    if dist.get_rank() == 1:
        for key, value in output.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-4)
        assert expected.keys() - output.keys() <= {"past_key_values", "cache"}
    expected.loss.backward()
    torch.testing.assert_close(rank.step(**batch), expected.loss.detach())
    own = dict(model.named_parameters())
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-3, atol=1e-5)
    with pytest.raises((TypeError, RemoteError), match="every rank needs the inputs"):
        rank.step(**({} if dist.get_rank() == 1 else batch))


def _model(name: str) -> Any:
    return made(CASES[name][0])[0]


def test_what_accelerate_prepares_is_refused(world: World):
    """This covers the rank itself, and a loader that would give each process different rows."""
    for text in world.run(_prepared):
        assert "DistributedDataParallel(rank), which accelerator.prepare(rank) also creates, is not supported" in text
        assert "input of rank 0 has other values than that of rank 1" in text


def _prepared() -> str:
    from accelerate import Accelerator

    texts = []
    with pytest.MonkeyPatch.context() as patch:  # as torchrun does
        for name, value in (("RANK", dist.get_rank()), ("LOCAL_RANK", dist.get_rank()), ("WORLD_SIZE", 2)):
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "29500")
        accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rank = Rank(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)
    x = torch.arange(64.0).view(16, 4)
    loader = accelerator.prepare(DataLoader(TensorDataset(x, x), 4))
    given = next(iter(loader))
    for call in (partial(accelerator.prepare, rank), partial(rank.step, *given, loss_fn=nn.functional.mse_loss)):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        texts.append(str(caught.value))
    return "".join(texts)

"""Checkpoints of ranks: training resumes on any number of ranks, with any balance, as if never interrupted."""

import gc
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe import GPipe
from gpipe.distributed import LostRankError, Rank, RemoteError, _checkpoints, load, save

from ..layers import Layer, Tied
from .planted import long_but
from .test_object_exchange import expect_named

LAYERS = 6
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 3


def network(seed: int = 0) -> nn.Sequential:
    """Return a model with buffers, a shared weight, a frozen layer, and parameters at two depths."""
    torch.manual_seed(seed)
    first, frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    deep = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    return nn.Sequential(first, deep, frozen, Tied(first), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def whole(seed: int = 0) -> Layer:
    """Return a model with a custom forward, whose head is tied to its first layer."""

    def forward(s: Layer, x: Tensor) -> Tensor:
        x = s.embed(x)
        for block in s.blocks:
            x = block(x)
        return s.head(s.norm(x))

    torch.manual_seed(seed)
    embed, head = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
    head.weight = embed.weight
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(k, 4), nn.Tanh()) for k in (3, 4, 4, 4)])
    return Layer(forward, embed=embed, head=head, blocks=blocks, norm=nn.BatchNorm1d(4)).double()


BLOCKS = ["embed", "blocks", "head"]
"""The blocks of the model with a custom forward; there are as many as the network has layers."""


class Setup(NamedTuple):
    """A way to train a model: unwrapped, in a pipe, or on several ranks.

    Attributes:
        size: the number of ranks; 0 for a module in this process.
        balance: the balance of the stages; None for the plain model.
        ranks: the rank of each stage.
        flat: whether the model has a custom forward.
    """

    size: int
    balance: list[int] | None
    ranks: list[int]
    flat: bool = False

    def make(self, seed: int) -> nn.Module:
        model = (whole if self.flat else network)(seed).eval()  # batch norm does not depend on micro-batches
        if self.balance is None:
            return model
        options: dict[str, Any] = {"chunks": 2, "blocks": BLOCKS if self.flat else None}
        if self.size:
            return Rank(model, self.balance, ranks=self.ranks, **options)
        return GPipe(model, self.balance, devices=["cpu"] * len(self.balance), **options)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    size = draw(st.sampled_from([0, 0, 2, 4]))
    if not size and draw(st.booleans()):
        return Setup(0, None, [])
    stages = draw(st.integers(max(size, 1), LAYERS))
    cuts = draw(st.permutations(range(1, LAYERS)))[: stages - 1]
    ends = [0, *sorted(cuts), LAYERS]
    more = draw(st.lists(st.integers(0, max(size - 1, 0)), min_size=stages - size, max_size=stages - size))
    ranks = draw(st.permutations([*range(size), *more]))
    return Setup(size, [b - a for a, b in pairwise(ends)], ranks if size else [])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: their options differ, one option is a tensor, and a group may be empty."""
    weights = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    return torch.optim.AdamW([{"params": weights, "lr": torch.tensor(0.02)}, {"params": others, "weight_decay": 0.1}])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        if isinstance(model, (Rank, GPipe)):
            loss = model.step(X, Y, loss_fn=F.cross_entropy)
        else:
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def begin(path: str, setup: Setup, steps: int) -> None:
    """Train and save."""
    model = setup.make(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    save(path, model, optimizer)


def go_on(path: str, setup: Setup, steps: int) -> list[float]:
    """Load into a trained model with different weights, and train on."""
    model = setup.make(1)
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    load(path, model, optimizer)
    return train(model, optimizer, steps)


@cache
def uninterrupted(steps: int, flat: bool = False) -> list[float]:
    model = (whole if flat else network)().eval()
    return train(model, optimizer_of(model), steps)


@pytest.fixture
def run(worlds: Any) -> Callable[..., list[Any]]:
    """Return a function that calls a function on ``size`` ranks, or in this process if ``size`` is 0."""

    def of(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return worlds(size).run(function, *arguments) if size else [function(*arguments)]

    return of


PLAIN, PIPE = Setup(0, None, []), Setup(0, [2, 4], [])
TWO, V, FOUR = Setup(2, [3, 3], [0, 1]), Setup(2, [1, 2, 2, 1], [1, 0, 0, 1]), Setup(4, [1, 2, 2, 1], [2, 0, 3, 1])


@settings(
    max_examples=max(2, settings().max_examples // 10),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(before=setups(), after=setups(), steps=st.integers(0, 2), flat=st.booleans())
@example(before=PLAIN, after=FOUR, steps=2, flat=True)
@example(before=TWO, after=PLAIN, steps=2, flat=True)
@example(before=FOUR, after=V, steps=1, flat=False)
@example(before=V, after=PIPE, steps=1, flat=True)
def test_training_resumes_with_a_different_setup(
    tmp_path_factory: Any, run: Any, before: Setup, after: Setup, steps: int, flat: bool
) -> None:
    """The model may have a custom forward."""
    path = str(tmp_path_factory.mktemp("run") / "checkpoint")
    run(before.size, begin, path, before._replace(flat=flat), steps)
    for losses in run(after.size, go_on, path, after._replace(flat=flat), 2):
        torch.testing.assert_close(losses, uninterrupted(steps + 2, flat)[steps:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("flat", [False, True])
def test_a_rank_loads_its_own_state(run: Any, flat: bool) -> None:
    run(2, _loads_its_own_state, TWO._replace(flat=flat))


def _loads_its_own_state(setup: Setup) -> None:
    one, other = setup.make(0), setup.make(1)
    assert one.state_dict().keys() < (whole if setup.flat else network)().state_dict().keys()
    other.load_state_dict(one.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_loads_the_checkpoint(tmp_path: Path, run: Any) -> None:
    """Model and optimizer are in the standard format, which ``torch.distributed.checkpoint`` reads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    path = str(tmp_path / "checkpoint")
    run(2, begin, path, TWO, 2)
    model = network(1).eval()
    optimizer = optimizer_of(model)
    options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = state_dict.get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path, no_dist=True)
    state_dict.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    torch.testing.assert_close(train(model, optimizer, 2), uninterrupted(4)[2:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("flat", [False, True])
def test_torch_saves_asynchronously_during_training(tmp_path: Path, run: Any, flat: bool) -> None:
    """The checkpoint has the state at the time of the call, and any number of processes can load it."""
    path = str(tmp_path / "checkpoint")
    run(2, begin_in_background, path, TWO._replace(flat=flat))
    for setup in (PLAIN, FOUR):
        for losses in run(setup.size, go_on, path, setup._replace(flat=flat), 2):
            torch.testing.assert_close(losses, uninterrupted(4, flat)[2:], rtol=1e-9, atol=1e-12)


def begin_in_background(path: str, setup: Setup) -> None:
    """Train two steps, start to save, and train two more steps while the checkpoint is written."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, trained = setup.make(0), threading.Event()
    optimizer, write = optimizer_of(model), dcp.FileSystemWriter.write_data
    train(model, optimizer, 2)
    moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", lambda *given: trained.wait(60) and write(*given))
        group = dist.new_group(backend="gloo")
        saving = dcp.async_save(
            {"model": model.state_dict(), "optimizer": moments}, checkpoint_id=path, process_group=group
        )
        losses = train(model, optimizer, 2)
        assert not saving.done()
        trained.set()
        saving.result()
    torch.testing.assert_close(losses, uninterrupted(4, setup.flat)[2:], rtol=1e-9, atol=1e-12)


def test_replicas_are_saved_once(tmp_path: Path, run: Any) -> None:
    """Two replicas of a pipe with two stages write about as many bytes as one pipe."""
    run(4, begin_replicas, str(tmp_path / "replicas"))
    run(2, begin, str(tmp_path / "one"), TWO, 1)
    sizes = [sum(file.stat().st_size for file in folder.glob("*.distcp")) for folder in sorted(tmp_path.iterdir())]
    assert sizes[1] < 1.2 * sizes[0]
    torch.testing.assert_close(go_on(str(tmp_path / "replicas"), PLAIN, 2), uninterrupted(3)[1:])


def begin_replicas(path: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    rank = Rank(network().eval(), [3, 3], chunks=2, group=mesh["stages"].get_group())
    optimizer = optimizer_of(rank)
    train(rank, optimizer, 1)
    save(path, rank, optimizer)


class Interrupted(BaseException):
    """An interrupt, such as a signal handler raises."""


@pytest.mark.parametrize("first", [True, False])
def test_interrupted_save_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """A save may be interrupted at any point, and the next save completes."""
    from torch.distributed.checkpoint import FileSystemWriter

    operations = [(Path, "mkdir"), (Path, "rename"), (shutil, "rmtree")]
    operations += [(FileSystemWriter, "write_data"), (FileSystemWriter, "finish")]

    def interrupt() -> None:
        raise Interrupted

    for last in range(20):
        path, found, calls, completed = tmp_path / str(last), _constant(0.0), count(), False
        if not first:
            save(path, _constant(1.0))
        with monkeypatch.context() as patch, suppress(Interrupted):
            for owner, name in operations:
                patch.setattr(owner, name, _at_call(last, calls, interrupt, getattr(owner, name)))
            save(path, _constant(2.0))
            completed = True
        with suppress(FileNotFoundError) if first else nullcontext():
            load(path, found)
        assert found[0].weight.unique().item() in ([2.0] if completed else [0.0, 2.0] if first else [1.0, 2.0])
        save(path, _constant(3.0))
        load(path, found)
        assert found[0].weight.unique().item() == 3.0
        assert {each.name for each in tmp_path.iterdir()} == {str(k) for k in range(last + 1)}
        if completed:
            assert last >= 5
            return
    raise AssertionError("no save was completed")


def _at_call(k: int, calls: Iterator[int], act: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, with a call of ``act`` when ``calls`` reaches ``k``."""

    def counted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == k:
            act()
        return function(*arguments, **options)

    return counted


def _constant(value: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


PHASES = ["state", "write", "between", "commit", "after"]  # only the first rank has the last two phases
SAVING = [(0, phase) for phase in PHASES] + [(who, phase) for who in (1, 2) for phase in PHASES[:3]]


@pytest.mark.parametrize(("who", "phase"), long_but(SAVING, (1, "write")))
def test_rank_killed_during_save_is_named(tmp_path: Path, who: int, phase: str) -> None:
    """The other ranks name it, even if they save again, and the last complete checkpoint can be loaded."""
    path = str(tmp_path / "checkpoint")
    save(path, _constant(1.0))
    expect_named(3, [who], lose_while_saving, path, phase)
    found = _constant(0.0)
    load(path, found)
    all_have_written = phase == "after" or (phase == "between" and who != 0)  # and the first rank commits it
    assert found[0].weight.unique().item() == (2.0 if all_have_written else 1.0)
    save(path, _constant(3.0))
    load(path, found)
    assert found[0].weight.unique().item() == 3.0
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def lose_while_saving(who: int, path: str, phase: str) -> str:
    """Return the error of the other ranks if ``who`` is killed in ``phase``."""
    from torch.distributed.checkpoint import FileSystemWriter

    rank = Rank(_constant(2.0), [1, 1, 1])
    if dist.get_rank() == who:
        owner, name = {
            "state": (rank, "state_dict"),
            "write": (FileSystemWriter, "write_data"),
            "between": (Path, "rename") if who == 0 else (_checkpoints, "agreement"),
            "commit": (Path, "rename"),
            "after": (shutil, "rmtree"),
        }[phase]
        calls = {"between": 1 if who == 0 else 2, "commit": 2, "after": 2}.get(phase, 1)
        die = partial(os.kill, os.getpid(), signal.SIGKILL)
        setattr(owner, name, _at_call(calls, count(1), die, getattr(owner, name)))
    for _ in range(2):
        with pytest.raises(LostRankError) as caught:
            save(path, rank)
    return str(caught.value)


WRONG: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    r"it has no 5\.bias, 5\.weight": lambda model: model[:5],
    r"the model has no 6\.bias, 6\.weight": lambda model: nn.Sequential(*model, nn.Linear(3, 3)),
    r"it has different shapes for 5\.bias, 5\.weight": lambda model: nn.Sequential(
        *model[:5], nn.Linear(4, 2).double()
    ),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("setup", [PLAIN, TWO], ids=["plain", "two"])
def test_checkpoint_of_a_different_model_raises(tmp_path: Path, run: Any, message: str, setup: Setup) -> None:
    """The error on all ranks names the difference, and no value has changed."""
    path = str(tmp_path / "checkpoint")
    save(path, WRONG[message](network()))
    run(setup.size, expect_refused, path, setup, message)


def expect_refused(path: str, setup: Setup, message: str) -> None:
    model = setup.make(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError), match=message):
        load(path, model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_missing_or_different_optimizer_raises(tmp_path: Path) -> None:
    path, model = tmp_path / "checkpoint", network()
    save(path, model)
    with pytest.raises(ValueError, match="was saved without one"):
        load(path, network(1), optimizer_of(network(1)))
    save(path, model, optimizer_of(model))
    other = network(1)
    with pytest.raises(ValueError, match="has the state of AdamW, but this optimizer is SGD"):
        load(path, other, torch.optim.SGD(other.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"in one group, but .* has lr=tensor\(0\.0200\) for the first and 0\.001"):
        load(path, other, torch.optim.AdamW([p for p in other.parameters() if p.requires_grad]))
    with pytest.raises(ValueError, match=r"the checkpoint has no state of '2\.weight'"):
        load(path, other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(ValueError, match="has a parameter of shape"):
        save(path, other, optimizer_of(model))
    assert not torch.equal(other[0].weight, model[0].weight)


def test_dict_as_extra_state_raises(tmp_path: Path) -> None:
    kind = type("Kind", (nn.Linear,), {"get_extra_state": lambda self: {"a": 1}})
    with pytest.raises(ValueError, match="the entry '_extra_state' is a dict"):
        save(tmp_path / "path", kind(1, 1))


def test_incomplete_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no complete checkpoint"):
        load(tmp_path / "none", network())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__0_0.distcp").touch()
    with pytest.raises(FileNotFoundError, match="there is no complete checkpoint"):
        load(tmp_path / "folder", network())
    with pytest.raises(FileExistsError, match="is not a checkpoint"):
        save(tmp_path / "folder", network())
    with pytest.raises(ValueError, match="expected a folder that all processes can access"):
        save("s3://bucket/checkpoint", network())


def test_rank_frees_parameters_of_other_stages(worlds):
    """Old graph nodes of its own parameters are freed too: they would make steps sum gradients outside ``.grad``."""
    worlds(2).run(_expect_own_parameters_only)


def _expect_own_parameters_only() -> None:
    model = whole()
    every = [*map(weakref.ref, model.parameters())]
    rank = Rank(model, [3, 3], chunks=2, blocks=BLOCKS)
    own = {*rank.parameters()}
    others = [each for each in every if each() not in own]
    marked = [get_gradient_edge(each).node for each in own if each.requires_grad]
    for node in marked:
        node.metadata["seen"] = True
    del model, node, marked
    gc.collect()
    assert others
    assert not [each for each in others if each() is not None]
    assert not [each for each in own if each.requires_grad and get_gradient_edge(each).node.metadata]


@pytest.mark.parametrize("size", [2, 3])
def test_empty_groups_take_options_from_other_ranks(worlds: Any, tmp_path: Path, size: int) -> None:
    """The layer with the group's parameters may be on any rank. A scheduler can resume."""
    path = str(tmp_path / "run")
    expected = worlds(2).run(_grouped, path, [1, 3], None)[0]
    for balance in ([1, 3], [3, 1]) if size == 2 else ([1, 1, 2], [2, 1, 1]):
        for found in worlds(size).run(_grouped, path, balance, expected):
            assert found == expected


def _grouped(path: str, balance: list[int], expected: Any) -> Any:
    """Return options and learning rates of all groups after a save or a load, and the rates of a resumed scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    rank = Rank(model, balance)
    embeddings = [p for name, p in rank.named_parameters() if name.startswith("0.")]
    rest = [p for name, p in rank.named_parameters() if not name.startswith("0.")]
    optimizer = torch.optim.AdamW([{"params": embeddings, "lr": 0.5, "weight_decay": 0.0}, {"params": rest}], lr=0.1)
    if expected is None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            rank.step(torch.arange(4), torch.arange(4) % 3, loss_fn=F.cross_entropy)
            optimizer.step()
            scheduler.step()
        save(path, rank, optimizer)
    else:
        load(path, rank, optimizer)
    options = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5, last_epoch=2)
    scheduler.step()
    rank.close()
    return options, rates, scheduler.get_last_lr()


def test_empty_group_requires_same_groups_on_all_ranks(worlds: Any, tmp_path: Path) -> None:
    for text in worlds(2).run(_other_groups, str(tmp_path / "run")):
        assert "has no parameters, so it has the options of the same group on other ranks" in text


def _other_groups(path: str) -> str:
    rank = Rank(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1])
    groups = [{"params": [*rank.parameters()]}]
    save(path, rank, torch.optim.SGD(groups, lr=0.1))
    groups = [{"params": []}, *groups] if dist.get_rank() == 1 else groups
    with pytest.raises((ValueError, RemoteError)) as caught:
        load(path, rank, torch.optim.SGD(groups, lr=0.1))
    return str(caught.value)


def test_repr_of_layers_without_biases(worlds: Any) -> None:
    for text in worlds(2).run(_printed):
        assert "bias=False" in text


def _printed() -> str:
    for make in (lambda: nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)]), _without_biases):
        balance = [3, 3] if isinstance(make(), nn.Sequential) else None
        rank = Rank(make(), balance)
        text = repr(rank)
        rank.close()
    return text


def _without_biases() -> nn.Module:
    blocks = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(6)])

    def forward(s: Layer, x: Tensor) -> Tensor:
        for block in s.blocks:
            x = block(x)
        return x

    return Layer(forward, blocks=blocks, norm=nn.LayerNorm(4, bias=False))

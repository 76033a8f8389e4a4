"""Ranks match one process bitwise, for random models, balances, placements and schedules over gloo."""

import copy
import gc
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import gpipe
from gpipe import GPipe, LossSum
from gpipe._current import current
from gpipe.distributed import Rank, RemoteError
from gpipe.schedule import checkpoint_stops

from ..layers import Layer, Tied
from ..models import Recipe, main_of, recipes
from ..schedules import CHOICES, LOOPED, V_SHAPED, some_schedule
from .planted import Planted, batch, expect_gradients, network, planted_in


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    max_examples=max(16, settings().max_examples // 4),
)
@given(
    recipes(),
    st.sampled_from([2, 3]),
    st.integers(0, 2**16),
    st.sampled_from(["1f1b", "fill_drain", "zero_bubble"]) | CHOICES,
    st.sampled_from(["mean", "counted", "whole"]),
    st.sampled_from([False, False, True, torch.bfloat16]),
)
def test_ranks_match_one_process(worlds, recipe: Recipe, size: int, seed: int, schedule: Any, loss: str, offload: Any):
    layers = len(recipe.model())
    assume(layers >= size)
    stages = min(layers, max(size, recipe.stages))
    modes = recipe.checkpoint
    modes = modes if isinstance(modes, str) else (*modes, "never", "always")[:stages]
    recipe = replace(recipe, stages=stages, checkpoint=modes)
    worlds(size).run(_expect_as_in_one_process, recipe, _placement(stages, size, seed), schedule, loss, offload)


def _placement(stages: int, size: int, seed: int) -> list[int]:
    """Return the process of each stage. Each process has at least one stage."""
    generator = torch.Generator().manual_seed(seed)
    ranks = [*range(size), *torch.randint(size, (stages - size,), generator=generator).tolist()]
    return [ranks[k] for k in torch.randperm(stages, generator=generator).tolist()]


def _expect_as_in_one_process(recipe: Recipe, ranks: list[int], schedule: Any, loss: str, offload: Any) -> None:
    model = recipe.model()
    balance = recipe.balance(len(model))
    options = {
        "chunks": recipe.chunks,
        "checkpoint": recipe.modes(recipe.stages),
        "deferred_batch_norm": recipe.deferred,
        "offload": offload,
    }
    one = GPipe(copy.deepcopy(model), balance, devices=[f"cpu:{rank}" for rank in ranks], **options)
    rank = Rank(model, balance, ranks=ranks, **options)
    for x in recipe.batches():
        own = _schedule(schedule, x, recipe, ranks, loss)
        found, expected = _trained(rank, x, own, loss), _trained(one, x, own, loss)
        if isinstance(expected, str):
            assert isinstance(found, str)
            return
        assert_same(found, expected)
    one.close()


def _schedule(schedule: Any, x: Tensor, recipe: Recipe, ranks: list[int], loss: str) -> Any:
    if isinstance(schedule, str):
        return schedule
    m = len(x.chunk(recipe.chunks))
    stops = checkpoint_stops(recipe.modes(recipe.stages), m, recipe.stages) if recipe.training else (0,)
    found = some_schedule(schedule, m, ranks, max(stops), in_order=True)
    try:
        return found.with_loss() if loss == "whole" else found
    except ValueError:  # a backward comes before the last forward
        return None


def _trained(pipe: Any, x: Tensor, schedule: Any, loss: str) -> dict[str, Any] | str:
    """Return the loss, the state and the gradients after a step, or the name of the error if it fails."""
    torch.manual_seed(1)
    try:
        with gpipe.inline():
            found = pipe.step(x.clone(), schedule=schedule, **LOSSES[loss])
    except Exception as error:
        return type(error).__name__
    state = {f"buffer {name}": buffer.clone() for name, buffer in pipe.named_buffers()}
    named = pipe.named_parameters(remove_duplicate=False)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in named}
    return {"loss": found, "generator": torch.get_rng_state(), **state, **gradients}


def _mean(output: Any) -> Tensor:
    return main_of(output).square().mean()


def _counted(output: Any) -> LossSum:
    x = main_of(output)
    return LossSum(x.square().sum(), x.numel())


def _of_all(output: Any) -> Tensor:
    x = main_of(output)
    return (x - x.mean(0)).square().mean() * x.square().mean()


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {"loss_fn": _mean, "reduction": "mean"},
    "counted": {"loss_fn": _counted},
    "whole": {"loss_fn": _of_all},
}


def assert_same(found: Any, expected: Any) -> None:
    """Expect that the values of this rank are equal to the values in one process."""
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("chunks", [2, 4, 6])
@pytest.mark.parametrize("schedule", [*V_SHAPED, *LOOPED, "zero_bubble"])
def test_interleaved_and_v_placements(worlds, schedule: str, chunks: int):
    worlds(2).run(_expect_placed, schedule, chunks)


def _expect_placed(schedule: str, chunks: int = 4) -> None:
    ranks = [0, 1, 1, 0] if schedule in V_SHAPED else None
    rank = Rank(network(), [2, 2, 2, 2], chunks=chunks, ranks=ranks)
    assert rank.ranks == (ranks or [0, 1, 0, 1])
    assert rank.stages == [j for j, own in enumerate(rank.ranks) if own == dist.get_rank()]
    _expect_right(rank, network(), schedule)


def test_last_rank_has_outputs_all_have_metrics(worlds):
    first, last = worlds(2).run(_outputs_and_metrics)
    assert first[0] is None
    torch.testing.assert_close(last[0], network()(batch()[0]))
    assert first[1] == last[1]
    assert first[1]["rows"] == 3.0
    assert first[2] is None
    torch.testing.assert_close(last[2], last[0])


def _outputs_and_metrics() -> Any:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[LossSum, dict[str, int]]:
        return LossSum((output - target).square().sum(), target.numel()), {"rows": len(output)}

    rank = Rank(network(), [4, 4], chunks=4)
    output = rank(batch()[0])
    assert output is None or not output.requires_grad
    assert len(rank.evaluate(*batch(), loss_fn=nn.functional.mse_loss, return_outputs=True)) == 2
    return output, *rank.step(*batch(), loss_fn=loss_fn, return_outputs=True)[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balance": [3, 5]}, "balance is .* on rank 0, but"),
        ({"chunks": 3}, "chunks is"),
        ({"ranks": [1, 0]}, "ranks is"),
        ({"checkpoint": "always"}, "checkpoint is"),
        ({"checkpoint": ["always", "never"]}, "checkpoint is"),
        ({"offload": True}, "offload is"),
        ({"model": nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])}, "the model is"),
    ],
)
def test_disagreeing_ranks_raise(worlds, change: dict[str, Any], message: str):
    for succeeded, text in worlds(2).answers(_disagree, change):
        assert not succeeded
        assert "ValueError: the ranks disagree" in text
        assert re.search(message, text)
    worlds(2).run(_expect_placed, "1f1b")


def _disagree(change: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": network(), "balance": [4, 4], "chunks": 4, "checkpoint": "never"}
    if dist.get_rank() == 1:
        options |= change
    rank = Rank(options.pop("model"), **options)
    rank.step(*batch(), loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("what", ["chunks", "method", "grad mode", "schedule", "interrupt"])
def test_rank_failing_before_run_is_named(worlds, what: str):
    for who in (2, 0):
        found = worlds(3).run(_expect_no_begin, who, what)
        kinds = {"chunks": "ValueError", "method": "ValueError", "schedule": "ValueError", "grad mode": "RuntimeError"}
        kind = kinds.get(what, "KeyboardInterrupt")
        disagrees = what in ("chunks", "method")
        for k, (name, text) in enumerate(found):
            assert name == (kind if disagrees or k == who else "RemoteError")
            assert disagrees or k == who or text.startswith(f"rank {who} failed: {kind}: ")
        assert not disagrees or len({text for _, text in found}) == 1


def _expect_no_begin(who: int, what: str) -> tuple[str, str]:
    plain = network()
    rank = Rank(copy.deepcopy(plain), [2, 2, 4], chunks=4)
    _expect_right(rank, plain, "1f1b")
    call: Any = rank.step
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss}
    given = batch()
    if dist.get_rank() == who:
        if what == "chunks":
            rank._chunks = 3
        elif what == "method":
            call = rank.evaluate
        elif what == "schedule":
            options["schedule"] = "none"
        elif what == "interrupt":
            rank._sharding.expect_whole = _interrupt
    try:
        with torch.set_grad_enabled(what != "grad mode" or dist.get_rank() != who):
            call(*given, **options)
    except BaseException as error:
        found = type(error).__name__, str(error)
    else:
        raise AssertionError("it has begun")
    rank._chunks = 4
    vars(rank._sharding).pop("expect_whole", None)
    _expect_right(rank, plain, "zero_bubble")
    return found


def _interrupt() -> None:
    raise KeyboardInterrupt


def watches(s: Layer, x: Tensor) -> Tensor:
    """Count how many outputs of this layer are in memory, and fail on demand."""
    if current.work.microbatch == s.fails_at:
        raise ArithmeticError("planted")
    found = x * 1.0
    s.refs.append(StorageWeakRef(found.untyped_storage()))
    s.most = max(s.most, sum(not ref.expired() for ref in s.refs))
    return found


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1]])
def test_evaluation_holds_no_more_than_1f1b(worlds, ranks: list[int]):
    """This holds for any placement. If an evaluation fails, no rank hangs because its messages are not received."""
    worlds(2).run(_expect_short_queues, ranks)


def _expect_short_queues(ranks: list[int]) -> None:
    n, m = len(ranks), 12
    watching = [Layer(watches, refs=[], most=0, fails_at=None) for _ in ranks]
    rank = Rank(nn.Sequential(*watching), [1] * n, chunks=m, ranks=ranks)
    layers = [partition[0] for partition in rank.partitions]
    torch.manual_seed(0)  # equal on all ranks, whatever random numbers they have used in other tests
    x = torch.randn(m, 2**18 + 1)  # each row is a message of several transfers
    for fails in (None, *range(n), None):
        for j, layer in zip(rank.stages, layers, strict=True):
            layer.fails_at = 3 if j == fails else None
        outcome = "right"
        try:
            torch.testing.assert_close(rank.evaluate(x, loss_fn=Tensor.mean, reduction="mean"), x.mean())
        except ArithmeticError:
            outcome = "own"
        except RemoteError:
            outcome = "another's"
        assert outcome == ("right" if fails is None else "own" if fails in rank.stages else "another's")
    chunks, rank._chunks = rank._chunks, m - dist.get_rank()
    with pytest.raises(ValueError, match="chunks"):
        rank.evaluate(x, loss_fn=Tensor.mean, reduction="mean")
    rank._chunks = chunks
    rank.evaluate(x, loss_fn=Tensor.mean, reduction="mean")
    for j, layer in zip(rank.stages, layers, strict=True):
        assert layer.most <= max(n - j, 2) + 2  # in flight, being computed, and just computed


def test_schedules_are_chosen_without_measuring(worlds):
    """Zero bubble splits the stages trained at creation, except the first of them, even if one is frozen later."""
    assert worlds(2).run(_choices) == [[("1f1b", ()), ("zero_bubble", (2, 3)), ("zero_bubble", (2, 3))]] * 2


def _choices() -> list[tuple[str, tuple[int, ...]]]:
    plain = network()
    plain[2].requires_grad_(False)
    rank, found = Rank(copy.deepcopy(plain), [2] * 4, chunks=4, ranks=[1, 0, 0, 1]), []
    with pytest.raises(ValueError, match=r"nothing is measured across processes.*gpipe\.simulate\.search"):
        _expect_right(rank, plain, "search")
    for schedule in ("auto", "zero_bubble", "zero_bubble"):
        _expect_right(rank, plain, schedule)
        found.append((rank.last_schedule.name, rank.last_schedule.split))
        if schedule == "zero_bubble":
            plain[4].requires_grad_(False)
            if 2 in rank.stages:
                rank.partitions[1].requires_grad_(False)
    return found


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_failure_reaches_all_ranks(worlds, error: type[BaseException], phase: str, schedule: str):
    for microbatch in range(3):
        for where in range(2):
            found = worlds(2).run(_fail, [(where, phase, microbatch)], error, schedule)
            assert found[where] == (error.__name__, "planted")
            kind, text = found[1 - where]
            assert kind == "RemoteError"
            assert text.startswith(f"rank {where} failed: {error.__name__}: planted\n  in partition {where} ")
            assert f"micro-batch {microbatch} of 3, {phase}" in text


def test_earlier_of_two_failures_is_reported(worlds):
    for _ in range(5):
        found = worlds(2).run(_fail, [(0, "forward", 2), (1, "forward", 0)], ArithmeticError, "fill_drain")
        assert [kind for kind, _ in found] == ["RemoteError", "ArithmeticError"]


def _fail(where: list[tuple[int, str, int]], error: type[BaseException], schedule: str) -> tuple[str, str]:
    """Return the error of a step. Nothing keeps its mini-batch in memory, and steps before and after it are correct."""
    model = nn.Sequential(nn.Linear(6, 6), Planted(), nn.Linear(6, 6), Planted())
    rank = Rank(copy.deepcopy(model), [2, 2], chunks=3, checkpoint="always")
    _expect_right(rank, model, schedule)
    for own, phase, microbatch in where:
        if own == dist.get_rank():
            planted_in(rank).when, planted_in(rank).how = (phase, microbatch), error
    gc.collect()
    gc.disable()
    x, y = batch()
    try:
        rank.step(x, y, loss_fn=nn.functional.mse_loss, schedule=schedule)
    except BaseException as raised:
        found = type(raised).__name__, str(raised)
    else:
        raise AssertionError("the step has not failed")
    finally:
        gc.enable()
    memory = StorageWeakRef(x.untyped_storage())
    del x, y
    assert memory.expired()
    planted_in(rank).when = None
    _expect_right(rank, model, schedule)
    return found


def _expect_right(rank: Rank, model: nn.Sequential, schedule: str) -> None:
    rank.zero_grad()
    model.zero_grad()
    x, y = batch()
    loss = rank.step(x, y, loss_fn=nn.functional.mse_loss, schedule=schedule)
    expected = nn.functional.mse_loss(model(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    expect_gradients(rank, model)


def test_unsupported_changes_of_a_rank_raise(worlds):
    assert worlds(2).run(_changes) == [["TypeError", "AttributeError", "TypeError", kind] for kind in _LAST]


_LAST = ("RuntimeError", "RemoteError")


def _changes() -> list[str]:
    """Return the errors of unsupported changes. A different number of chunks is supported."""
    plain, found = network(), list[str]()
    rank = Rank(copy.deepcopy(plain), [2, 6], chunks=4)
    rank.chunks = 2
    _expect_right(rank, plain, "1f1b")
    name, layer = next(rank.named_children())
    changes: list[tuple[Any, ...]] = [(setattr, rank, name, layer), (setattr, rank, "checkpoint", "always")]
    for change, *arguments in [*changes, (rank.to, "meta"), (_expect_right, rank, plain, "1f1b")]:
        if change is _expect_right and dist.get_rank() == 0:
            rank.partitions[0]._modules[name] = nn.Identity()
        with pytest.raises(Exception) as refused:  # noqa: PT011
            change(*arguments)
        found.append(type(refused.value).__name__)
    return found


def test_optimizer_inside_a_step_raises(worlds):
    """This holds even if parameters are on the host, in contrast to a pipe in one process."""
    worlds(2).run(_expect_no_optimizer)


def _expect_no_optimizer() -> None:
    rank = Rank(network(), [4, 4], chunks=4, offload=True)
    before = [parameter.clone() for parameter in rank.parameters()]
    optimizer = torch.optim.SGD(rank.parameters())
    with pytest.raises(ValueError, match=r"call optimizer\.step\(\) after step\(\)"):
        rank.step(*batch(), loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    torch.testing.assert_close([*rank.parameters()], before)


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    layers = [first, nn.Tanh(), Tied(second), nn.Tanh(), second, nn.Tanh(), Tied(first), Tied(second)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(("size", "balance"), [(2, [2, 2, 2, 2]), (3, [2, 2, 4]), (2, [3, 5])])
def test_shared_weights_of_ranks_stay_equal(worlds, schedule: str, size: int, balance: list[int]):
    worlds(size).run(_expect_tied, schedule, balance)


def _expect_tied(schedule: str, balance: list[int]) -> None:
    plain = tied()
    other = tied()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(dist.get_rank())  # as with a different seed
    rank = Rank(other, balance, chunks=4)
    names = dict(plain.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in rank.named_parameters():
            if name in ("0.weight", "6.weight"):  # shared weights have the values of the first rank that has them
                assert torch.equal(parameter, names[name])
            parameter.copy_(names[name])
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (plain, rank)]
    x, y = batch()
    for _ in range(3):
        (nn.functional.mse_loss(plain(x), y) / 2).backward()
        (nn.functional.mse_loss(plain(x), y) / 2).backward()
        for _ in range(2):
            rank.step(x, y, loss_fn=_half, reduction="mean", schedule=schedule)
        expect_gradients(rank, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter, names[name])


def _half(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) / 2


def test_all_ranks_record_the_same_events(worlds):
    first, last = worlds(2).run(_recorded)
    assert first == last
    assert set(first[0]) == {f"{kind}{i}@{j}" for kind in "FB" for i in range(3) for j in range(2)}
    assert first[1] == {0: 0, 1: 1}


def _recorded() -> tuple[list[str], dict[int, int]]:
    rank = Rank(network(), [4, 4], chunks=3, checkpoint="never")
    with gpipe.record() as timeline:
        rank.step(*batch(), loss_fn=nn.functional.mse_loss)
    return sorted(map(str, timeline.events)), timeline.workers

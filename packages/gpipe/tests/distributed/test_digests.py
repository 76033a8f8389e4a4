"""Ranks of a pipe train on the same rows: if a mini-batch differs between two ranks, all of them raise."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpipe.distributed import Rank, RemoteError, _digests
from gpipe.distributed._digests import COUNT, SAMPLE, Digest, Digests, different_rows
from microbatch import Replicate, Split

from ..layers import Layer
from .planted import expect_gradients, mesh_of_four, network

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128]
shapes = st.lists(st.integers(1, 5), max_size=3) | st.just([8, SAMPLE]) | st.just([64, 1000])


def _random(shape: list[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, shape, generator=generator).to(dtype)


def _digest(tensor: Any) -> Digest:
    (found,) = Digests({"x": tensor}).known.values()
    return found


@given(shapes, st.sampled_from(DTYPES))
def test_digests_of_equal_values_are_equal(shape: list[int], dtype: torch.dtype) -> None:
    """The memory layout, and how the values will be split, do not matter."""
    x = _random(shape, dtype)
    apart = torch.stack([x, x], -1)[..., 0]
    for other in (
        x.clone(),
        apart,
        x.clone().requires_grad_() if dtype.is_floating_point else x,
        Split(x),
        Replicate(x),
    ):
        assert _digest(other) == _digest(x)
    assert _digest(x).value is not None


@given(shapes, st.sampled_from(DTYPES), st.data())
def test_digests_of_different_rows_differ(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    """Rows may be rotated or from a later mini-batch, or one element of a small tensor may differ."""
    x = _random(shape, dtype)
    y = x.clone()
    if x.numel() <= 2 * SAMPLE:
        at = data.draw(st.integers(0, x.numel() - 1))
        y.view(-1)[at] = ~y.view(-1)[at] if dtype is torch.bool else y.view(-1)[at] + 1
        assert _digest(x) != _digest(y)
    for other in (x.roll(1, 0) if x.dim() else x, torch.cat([x[1:], x[:1] + 1]) if x.dim() else x):
        assert torch.equal(other, x) == (not _digest(x).differs(_digest(other)))


def test_tensors_without_readable_elements_compare_by_shape() -> None:
    for value in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.empty(0)):
        assert _digest(value).value is None
    assert not Digests({"x": None, "y": [object(), [1, 2].append]}).known


def test_late_digest_is_compared_with_all_ranks() -> None:
    unknown, one, two = (Digest((3,), "torch.float32", value) for value in (None, 1, 2))
    assert different_rows([(0, {"x": unknown}), (1, {"x": one}), (0, {"x": one})]) is None
    error = different_rows([(0, {"x": unknown}), (1, {"x": one}), (0, {"x": two})])
    assert "x of rank 1 has other values than that of rank 0" in str(error)
    error = different_rows([(0, {"x": one}), (3, {"x": one._replace(shape=(4,))})])
    assert "x of rank 0 has shape (3,) and dtype float32, but shape (4,) and dtype float32 of rank 3" in str(error)


ARGUMENTS = ["input", "target"]


@st.composite
def mini_batches(draw: st.DrawFn) -> list[dict[str, int | None]]:
    """Return, per rank and argument, the seed of its values; None if the rank does not need it and omits it."""
    size = draw(st.sampled_from([2, 3]))
    found = [{name: draw(st.sampled_from([0, 0, 0, 1, None])) for name in ARGUMENTS} for _ in range(size)]
    found[0]["input"] = found[0]["input"] or 0
    found[-1]["target"] = found[-1]["target"] or 0
    return found


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=max(16, settings().max_examples // 4),
)
@given(mini_batches(), st.sampled_from(["step", "evaluate", "forward"]), st.booleans(), st.booleans())
def test_ranks_with_different_rows_raise(
    worlds: Any, seeds: list[dict[str, int | None]], method: str, late: bool, nested: bool
) -> None:
    """All ranks raise before any gradient is computed, or at the end of the step if the values are on a device."""
    used = ARGUMENTS[:1] if method == "forward" else ARGUMENTS
    apart = [
        (name, k)
        for name in used
        for k, own in enumerate(seeds)
        if None not in (own[name], seeds[0][name]) and own[name] != seeds[0][name]
    ]
    found = worlds(len(seeds)).run(_expect_told, seeds, method, late, nested)
    for text in found:
        assert (text is not None) == bool(apart)
        if text is not None:
            assert any(f"{name}{'[0]' * nested} of rank 0 has " in text and f"of rank {k}" in text for name, k in apart)
            assert "DistributedSampler" in text


def _expect_told(seeds: list[dict[str, int | None]], method: str, late: bool, nested: bool) -> str | None:
    plain, size = network(), dist.get_world_size()
    first = Layer(lambda s, x: x[0] if isinstance(x, tuple) else x * 1.0)
    model = nn.Sequential(first, *copy.deepcopy(plain))
    rank = Rank(model, [9 - 2 * (size - 1), *[2] * (size - 1)], chunks=2)

    def made(seed: int | None) -> Any:
        x = None if seed is None else torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        return (x,) if nested else x

    def loss_fn(output: Any, target: Any) -> Tensor:
        return nn.functional.mse_loss(output, target[0] if nested else target)

    own = seeds[dist.get_rank()]
    given, found = [made(own["input"]), made(own["target"])], None
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(_digests, "_read_hash", lambda hashed: None)
        try:
            if method == "forward":
                rank(given[0])
            else:
                getattr(rank, method)(*given, loss_fn=loss_fn, reduction="mean")
        except ValueError as error:
            found = str(error)
            assert late or all(p.grad is None for p in rank.parameters())
    rank.zero_grad()
    rank.step(made(7), made(8), loss_fn=loss_fn, reduction="mean")
    loss_fn(plain(torch.randn(4, 6, generator=torch.Generator().manual_seed(7))), made(8)).backward()
    for layer, other in zip(rank.parameters(), _own(rank, plain), strict=True):
        torch.testing.assert_close(layer.grad, other.grad)
    rank.close()
    return found


def _own(rank: Rank, plain: nn.Module) -> list[nn.Parameter]:
    named = dict(plain.named_parameters())
    return [named[f"{int(name.split('.')[0]) - 1}.{name.split('.')[1]}"] for name, _ in rank.named_parameters()]


@pytest.mark.parametrize("how", ["sampler", "skips", "shuffles"])
def test_independent_loaders_raise(worlds: Any, how: str) -> None:
    for at, text in worlds(2).run(_loads, how):
        assert "input of rank 0 has other values than that of rank 1" in text
        assert at == (2 if how == "skips" else 0)


def _loads(how: str) -> tuple[int, str]:
    """Return the index of the mini-batch that raises, and the error."""
    x = torch.arange(96.0).view(16, 6)
    data, me = TensorDataset(x, x), dist.get_rank()
    if how == "skips" and me == 1:
        data = TensorDataset(*[torch.cat([x[:9], x[10:]])] * 2)  # this rank skips a sample that it cannot read
    sampler = DistributedSampler(data, shuffle=False) if how == "sampler" else None
    generator = torch.Generator().manual_seed(me) if how == "shuffles" else None
    loader = DataLoader(data, 4, sampler=sampler, shuffle=how == "shuffles", generator=generator, drop_last=True)
    rank = Rank(network(), [4, 4], chunks=2)
    for at, (x, y) in enumerate(loader):
        try:
            rank.step(x, y, loss_fn=nn.functional.mse_loss)
        except ValueError as error:
            rank.close()
            return at, str(error)
    raise AssertionError("all mini-batches were trained")


def test_each_replica_has_its_own_rows(worlds: Any) -> None:
    """All replicas raise if the rows of one replica differ between its ranks."""
    worlds(4).run(_expect_own_rows)


def _expect_own_rows() -> None:
    mesh = mesh_of_four()
    x = torch.arange(96.0).view(16, 6) / 96
    sampler = DistributedSampler(
        TensorDataset(x), num_replicas=2, rank=mesh["replicas"].get_local_rank(), shuffle=False
    )
    rank = Rank(network(), [4, 4], chunks=2, group=mesh["stages"], replicas=mesh["replicas"])
    own = x[list(sampler)]
    rank.step(own, own, loss_fn=nn.functional.mse_loss)
    rank.zero_grad()
    other = own + 1 if dist.get_rank() == 3 else own
    with pytest.raises((ValueError, RemoteError), match="input of rank 2 has other values than that of rank 3"):
        rank.step(other, own, loss_fn=nn.functional.mse_loss)
    assert all(p.grad is None for p in rank.parameters())


def test_ranks_may_omit_unneeded_arguments(worlds: Any) -> None:
    worlds(2).run(_expect_omitted)


def _expect_omitted() -> None:
    plain, rank = network(), Rank(network(), [4, 4], chunks=2)
    x, y = torch.ones(4, 6), torch.zeros(4, 6)
    given = {"target": y} if dist.get_rank() else {}
    rank.step(*([] if given else [x]), loss_fn=nn.functional.mse_loss, reduction="mean", **given)
    nn.functional.mse_loss(plain(x), y).backward()
    expect_gradients(rank, plain)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, options: Any = None) -> Tensor:
        return self.linear(x) * (1.0 if options is None else options["scale"])


VALUES: list[Any] = [True, False, 1, 2, 1.0, -0.5, "mean", "sum", "long " * 50, "long " * 50 + "other", b"x"]
"""``1`` and ``1.0`` differ as well, because layers may compute different dtypes from them."""


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=max(6, settings().max_examples // 4),
)
@given(*[st.sampled_from(VALUES)] * 4, st.sampled_from(["step", "evaluate"]), st.booleans())
def test_different_numbers_or_strings_raise(
    worlds: Any, one: Any, other: Any, first: Any, second: Any, method: str, omits: bool
) -> None:
    """All ranks raise an error that names the value, before any gradient is computed. None is not compared."""
    given = [[one, first], [one if omits else other, second]]
    differ = [
        (name, values)
        for name, values in (("['mode']", (one, given[1][0])), ("['more']['deep']", (first, second)))
        if repr(values[0]) != repr(values[1]) and not (omits and name == "['more']['deep']")
    ]
    for text in worlds(2).run(_pass_values, given, method, omits):
        assert (text is not None) == bool(differ)
        if text is not None:
            assert any(f"options{name} is " in text for name, _ in differ), text
            assert "on rank 0, but " in text
            assert text.endswith("is not needed")


def _pass_values(given: list[list[Any]], method: str, omits: bool) -> str | None:
    torch.manual_seed(0)
    rank = Rank(nn.Sequential(_Scaled(), nn.Linear(6, 6)), [1, 1], chunks=2)
    mode, more = given[dist.get_rank()]
    options = {"scale": 2.0, "mode": mode, "more": {"deep": None if omits and dist.get_rank() else more}}
    x, found = torch.ones(4, 6), None
    try:
        getattr(rank, method)(x=x, options=options, loss_fn=Tensor.mean, reduction="mean")
    except ValueError as error:
        found = str(error)
        assert all(p.grad is None for p in rank.parameters())
    rank.step(x=x, options={"scale": 2.0}, loss_fn=Tensor.mean, reduction="mean")
    rank.close()
    return found


def test_number_of_compared_values_is_limited() -> None:
    """Lists with a number per row of the mini-batch would take too long."""
    assert len(Digests({"x": [*range(1000)], "y": ["a"]}).known) == COUNT + 1

"""One rank reads the mini-batches of all ranks of a pipe."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import Rank, RemoteError, broadcast_batches

from ..layers import Layer
from .planted import expect_gradients, network


def _loader(fails: bool) -> Iterator[dict[str, Any]]:
    for k in range(3):
        if k == 2 and fails:
            raise ArithmeticError("an unreadable sample")
        x = torch.arange(48.0).view(8, 6)[k::2]  # views of one storage
        yield {"x": x / 48, "y": -x, "number": k}


def test_ranks_receive_the_batches_they_need(worlds: Any) -> None:
    for ranks, fails in product([[0, 1], [0, 1, 2], [2, 0, 1]], [False, True]):
        found = worlds(len(ranks)).run(_read, ranks, fails)
        for k, (numbers, has_data, error) in enumerate(found):
            assert numbers == ([0, 1] if fails else [0, 1, 2])
            assert has_data == {k in (ranks[0], ranks[-1])}
            assert error == (None if not fails else "ArithmeticError" if k == ranks[0] else "RemoteError")


def _read(ranks: list[int], fails: bool) -> tuple[list[int], set[bool], str | None]:
    plain, size = network(), dist.get_world_size()
    rank = Rank(network(), [8 - 2 * (size - 1), *[2] * (size - 1)], ranks=ranks, chunks=2)
    loader = _loader(fails) if dist.get_rank() == ranks[0] else None
    numbers, has_data, error = [], set(), None
    try:
        for batch, own in zip(broadcast_batches(loader, rank), _loader(False), strict=False):
            numbers.append(batch["number"])
            has_data.add(batch["x"] is not None)
            loss = rank.step(batch["x"], batch["y"], loss_fn=nn.functional.mse_loss, reduction="mean")
            expected = nn.functional.mse_loss(plain(own["x"]), own["y"])
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
    except (ArithmeticError, RemoteError) as failed:
        error = type(failed).__name__
    expect_gradients(rank, plain)
    rank.step(own["x"], own["y"], loss_fn=nn.functional.mse_loss, reduction="mean")
    rank.close()
    return numbers, has_data, error


def test_all_ranks_of_a_model_get_all_inputs(worlds: Any) -> None:
    worlds(2).run(_expect_inputs)


def _expect_inputs() -> None:
    def forward(s: Layer, x: Tensor) -> Tensor:
        for block in s.blocks:
            x = block(x)
        return x

    rank = Rank(Layer(forward, blocks=nn.ModuleList(nn.Linear(6, 6) for _ in range(4))), chunks=2)
    for batch in broadcast_batches(_loader(False) if dist.get_rank() == 0 else None, rank):
        rank.step(batch["x"], batch["y"], loss_fn=nn.functional.mse_loss, reduction="mean")
    rank.close()


def test_step_while_another_rank_reads_raises(worlds: Any) -> None:
    for who in range(2):
        for text in worlds(2).run(_step_instead, who):
            assert "the method that is called is" in text


def _step_instead(who: int) -> str:
    rank = Rank(network(), [4, 4], chunks=2)
    x = torch.ones(4, 6)
    for steps in (dist.get_rank() == who, True):  # the second time all ranks do
        try:
            if steps:
                rank.step(x, x, loss_fn=nn.functional.mse_loss, reduction="mean")
            else:
                next(broadcast_batches([x], rank))
        except ValueError as error:
            found = str(error)
    rank.close()
    return found


def test_the_rank_that_reads_needs_a_loader(worlds: Any) -> None:
    assert worlds(2).run(_without_loader) == ["TypeError", "RemoteError"]


def _without_loader() -> str:
    rank = Rank(network(), [4, 4], chunks=2)
    with pytest.raises((TypeError, RemoteError), match="loader is None on the rank of the first stage") as caught:
        next(broadcast_batches(None, rank))
    rank.close()
    return caught.type.__name__

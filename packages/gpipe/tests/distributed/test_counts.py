"""The traffic of ranks grows with their number only as documented in ``docs/benchmarks/ranks.md``."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import Rank
from gpipe.distributed._messages import Peer, RemoteLink

CHUNKS = 4


def _counts() -> dict[str, Any]:
    """Count what this rank sends at creation and in its first two steps, and the ranks it exchanges messages with."""
    sent: Counter[str] = Counter()

    def counting(cls: type, name: str) -> Any:
        right = getattr(cls, name)

        def counted(self: Any, *given: Any, **options: Any) -> Any:
            sent[name] += 1
            sent["bytes"] += len(given[0]) if name == "tell" and isinstance(given[0], bytes) else 0
            return right(self, *given, **options)

        return counted

    n = dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for cls, name in ((RemoteLink, "put"), (RemoteLink, "tell"), (Peer, "send"), (Peer, "receive")):
            patch.setattr(cls, name, counting(cls, name))
        rank = Rank(nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)]), [1] * n, chunks=CHUNKS)
        steps = [dict(sent)]
        for _ in range(2):
            sent.clear()
            torch.manual_seed(0)  # the announced seed of a step has as many bytes as its value needs
            rank.step(torch.randn(8, 4), loss_fn=Tensor.mean)
            steps.append(dict(sent))
    return {"made": steps[0], "first": steps[1], "step": steps[2], "peers": len(rank._processes._exchange.groups.peers)}


SIZES = [2, 4, pytest.param(8, marks=pytest.mark.long)]


@pytest.mark.parametrize("n", SIZES)
def test_message_counts_match_the_documentation(worlds: Any, n: int) -> None:
    """Each rank has one stage. The root sends to all others, and they to the root. Each message is one transfer."""
    for k, found in enumerate(worlds(n).run(_counts)):
        neighbours = {k - 1, k + 1} & {*range(n)}
        told, heard = (2 * (n - 1), n - 1) if k == 0 else (1, 2)
        assert found["step"]["put"] == CHUNKS * len(neighbours)
        assert found["step"]["tell"] == told
        assert found["first"]["send"] == found["step"]["send"] == CHUNKS * len(neighbours) + told
        assert found["step"]["receive"] == CHUNKS * len(neighbours) + heard
        assert found["made"]["tell"] == (2 if k else 2 * (n - 1))
        assert found["peers"] == (len(neighbours | {0}) if k else n - 1)


def test_bytes_sent_to_each_rank_hardly_grow(worlds: Any) -> None:
    """Reports of a step are empty, so nothing grows. At creation, reports contain a few properties of each rank."""
    found = {n: worlds(n).run(_counts)[0] for n in (2, 4)}
    each = {n: found[n]["step"]["bytes"] / (n - 1) for n in found}
    assert each[4] == each[2] > 0
    made = {n: found[n]["made"]["bytes"] / (n - 1) for n in found}
    assert 0 < made[4] - made[2] < 2 * 200, made

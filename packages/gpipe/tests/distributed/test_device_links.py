"""Options passed to NCCL: a stub reports them in its error, because tests on GPUs would not notice wrong ones."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from gpipe.distributed import Rank, _local_stages
from gpipe.distributed._device_links import MOST

from ..worlds import World


class NCCL:
    """A stub process group whose constructor always fails."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    def __init__(self, store: Any, number: int, size: int, options: Any) -> None:
        raise RuntimeError(f"of {size} with {vars(options)}")


def _error(stages: int) -> str:
    """Return the error of a rank whose device seems to have NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_local_stages, "find_backend", lambda *_: "nccl")
        patch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", NCCL, raising=False)
        layers = [nn.Linear(2, 2) for _ in range(stages)]
        with pytest.raises((RuntimeError, ValueError)) as caught:
            Rank(nn.Sequential(*layers), [1] * stages, timeout=60.0)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_communicators_use_high_priority_streams(worlds: Any) -> None:
    """Streams for computation and copies come from a different pool, so they do not wait for a transfer."""
    two: World = worlds(2)
    for found in two.run(_error, 2):
        assert found.startswith("RuntimeError: rank "), found
        for part in ("'is_high_priority_stream': True", "'_timeout': datetime.timedelta(seconds=180)", "[0, 1]"):
            assert part in found
        assert "use transport='host'" in found


def test_more_links_than_streams_raise(worlds: Any) -> None:
    """Each of two ranks has an end of all links."""
    fits = MOST // 2 + 1
    assert all("is_high_priority_stream" in found for found in worlds(2).run(_error, fits))
    for found in worlds(2).run(_error, fits + 1):
        assert found.startswith(
            ("ValueError: cpu would need", "RemoteError: rank 0 failed: ValueError: cpu would need")
        )
        assert "transport='host'" in found

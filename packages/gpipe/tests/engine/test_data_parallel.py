"""``DistributedDataParallel(pipe)`` trains as it does with the plain model: replicas stay equal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)

PREPARED = """
    import copy, itertools, os, torch, torch._dynamo, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from gpipe import GPipe

    torch.set_num_threads(1)
    # Forked where all is imported, DistributedDataParallel's compiler too, and no thread has begun.
    child = os.fork()
    rank = 0 if child else 1
    dist.init_process_group("gloo", rank=rank, world_size=2)

    class Sometimes(nn.Module):
        # Uses its second layer for some inputs only.
        def __init__(self):
            super().__init__()
            self.always, self.rarely = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.always(x) + (self.rarely(x) if x.sum() > 0 else 0)

    def linears():
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()

    def conditional():
        return nn.Sequential(nn.Linear(3, 3), Sometimes(), nn.Linear(3, 3)).double()

    def batch(step, rows):
        return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))

    def pair(make, mode, **options):
        torch.manual_seed(0)
        model = make()
        pipe = GPipe(copy.deepcopy(model), [2, len(model) - 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
        return DistributedDataParallel(pipe, **options), DistributedDataParallel(model, **options)

    def assert_same(ddp, plain):
        for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)
            both = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(both, p.detach())
            assert torch.equal(*both), "replicas drift"

    def descend(*modules):
        for module in modules:
            for p in module.parameters():
                if p.grad is not None:
                    p.data -= 0.1 * p.grad
            module.zero_grad()
"""

CHANGING_BATCHES = """
    options = [{"static_graph": True}, {}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
    for mode, option in itertools.product(MODES, options):
        ddp, plain = pair(linears, mode, **option)
        for step, rows in enumerate((6, 6, 1, 2, 6)):
            for each in (ddp, plain):
                decay = sum(p.square().sum() for p in each.parameters()) if step % 2 and not option else 0
                (each(batch(step, rows)).square().mean() + decay).backward()
            assert_same(ddp, plain)
            descend(ddp, plain)
        ddp.module.close()
"""

UNUSED = """
    for mode in MODES:
        torch.manual_seed(0)
        model = conditional()
        pipe = GPipe(copy.deepcopy(model), [2, 1], devices=["cpu"] * 2, chunks=1, checkpoint=mode)
        ddp, plain = (DistributedDataParallel(each, find_unused_parameters=True) for each in (pipe, model))
        for step in range(6):
            for each in (ddp, plain):
                each(batch(step, 4)).square().mean().backward()
            assert_same(ddp, plain)
            descend(ddp, plain)
        pipe.close()
"""

STEP = """
    ddp, plain = pair(linears, "except_last")
    loss_fn = lambda o, _: o.square().mean()
    try:
        ddp.module.step(batch(0, 6), loss_fn=loss_fn)
    except RuntimeError as error:
        assert "DistributedDataParallel around this pipe" in str(error), error
    else:
        raise AssertionError("step() would not average gradients")
    for accumulates in (True, False):
        with ddp.no_sync(), plain.no_sync():
            ddp.module.step(batch(1, 6), loss_fn=loss_fn)
            plain(batch(1, 6)).square().mean().backward()
        for each in (ddp, plain):
            each(batch(2, 2)).square().mean().backward()
        assert_same(ddp, plain)
        descend(ddp, plain)
    ddp.module.close()
"""

REENTRANT = """
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    model = nn.Sequential(nn.Linear(3, 3), Checkpointed(3, 3)).double()
    ddp = DistributedDataParallel(GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2), static_graph=True)
    try:
        ddp(batch(0, 4)).sum().backward()
    except RuntimeError as error:
        assert "use use_reentrant=False" in str(error), error
    else:
        raise AssertionError("hooks would fire once a micro-batch")
    ddp.module.close()
"""


@pytest.mark.parametrize("modes", [["except_last"], pytest.param(["never", "always"], marks=pytest.mark.long)])
def test_data_parallel_over_two_processes(modes: list[str]):
    """Changing numbers of micro-batches; parameters that are not used; ``step()``, which is refused."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    end = "dist.destroy_process_group()\nassert rank or os.waitpid(child, 0)[1] == 0"
    text = "\n".join(
        [
            f"MODES = {modes}",
            textwrap.dedent(PREPARED),
            *map(textwrap.dedent, (CHANGING_BATCHES, UNUSED, STEP, REENTRANT)),
            end,
        ]
    )
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also the rank whose other one has failed
        process.wait()

"""A process group of this process alone: is one opened, does it add, and does a rank train over it?"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpipe.distributed import Rank

from .common import head, mean_square, network, row, two_devices


def main() -> None:
    device = two_devices()[0]
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    head("what", "found")
    row("backend", f"{backend} {torch.cuda.nccl.version() if backend == 'nccl' else ''}")
    total = torch.ones(4, device=device)
    dist.all_reduce(total)
    row("sum over the group", total.tolist())
    x, plain = torch.randn(16, 64, device=device), network(64).to(device)
    mean_square(plain(x)).backward()
    for transport in ("auto", "host"):
        rank = Rank(network(64), [8], chunks=4, device=device, transport=transport)
        rank.step(x, loss_fn=mean_square)
        pairs = zip(rank.parameters(), plain.parameters(), strict=True)
        row(
            f"largest difference of gradients, {transport}", max((a.grad - b.grad).abs().max().item() for a, b in pairs)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

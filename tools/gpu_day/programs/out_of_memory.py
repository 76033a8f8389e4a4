"""A layer that allocates more memory than exists: the error, the state after the step, and the next step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe import GPipe

from .common import MODES, gpus, head, network, row, step, synchronize, two_devices


class Greedy(nn.Module):
    """The identity; if ``now`` is set, it first allocates twice the memory of its device."""

    now = False

    def forward(self, x: Tensor) -> Tensor:
        if self.now:
            total = torch.cuda.get_device_properties(x.device).total_memory if x.is_cuda else 2**60
            torch.empty(2 * total, dtype=torch.uint8, device=x.device)
        return x * 1


def main() -> None:
    devices, wrong = two_devices(), 0
    x = torch.randn(64, 256, device=devices[0])
    head("checkpoint", "schedule", "error", "MiB left over", "next step")
    for mode in MODES:
        for schedule in ("fill_drain", "1f1b"):
            greedy = Greedy()
            pipe = GPipe(nn.Sequential(*network(256), greedy), [4, 5], devices=devices, chunks=4, checkpoint=mode)
            wanted = step(pipe, x, schedule).item()
            before = held(devices)
            greedy.now, error = True, "none"
            try:
                step(pipe, x, schedule)
            except (RuntimeError, MemoryError) as found:
                error = f"{type(found).__name__}, {place(found)}"
            greedy.now = False
            pipe.zero_grad()
            left = (held(devices) - before) / 2**20
            same = step(pipe, x, schedule).item() == wanted
            row(mode, schedule, error, f"{left:.1f}", "as before" if same else "another loss")
            wrong = max(wrong, not same or "names" not in error)
            pipe.close()
    raise SystemExit(wrong)


def place(error: BaseException) -> str:
    """Return whether ``error`` names the partition."""
    texts = [*getattr(error, "__notes__", []), *map(str, error.args)]
    return "names the partition" if any("partition 1" in text for text in texts) else "no partition"


def held(devices: list[torch.device]) -> int:
    synchronize(devices)
    return sum(torch.cuda.memory_allocated(device) for device in gpus(devices))


if __name__ == "__main__":
    main()

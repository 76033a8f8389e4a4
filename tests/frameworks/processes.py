"""A small network and its data, for frameworks that train it; and two processes that train together."""

import os
import socket
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from gpipe import GPipe

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def piped(balance: list[int] | None, **options: Any) -> nn.Module:
    """Return the network in a pipe, or the plain network without a balance."""
    if balance is None:
        return network()
    return GPipe(network(), balance, devices=["cpu"] * len(balance), chunks=3, **options)


def expect_equal_in_two(code: str, **environment: str) -> None:
    """Run ``code`` in two processes that find each other; both have to print "equal"."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0", **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **common, "PYTHONPATH": os.pathsep.join(sys.path), "LOCAL_RANK": rank, "RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        for process in processes:
            output, _ = process.communicate()
            assert "equal" in output, output
    finally:
        for process in processes:
            process.kill()
            process.wait()

"""Tests of processes need them."""

from __future__ import annotations

import torch.distributed as dist

collect_ignore_glob = [] if dist.is_available() else ["test_*.py"]

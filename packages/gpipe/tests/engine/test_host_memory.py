"""The host's memory is checked before parameters or gradients are put there."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe
from gpipe.engine import _host_memory
from gpipe.engine._host_memory import available_bytes, expect_host_memory

from ..layers import linears, rows

SIZES = st.integers(0, 2**50)
FILES = {
    "v2": ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    "v1": ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
}


def written(root: Path, kibibytes: int | None, groups: str | None, limit: int | None, used: int, cached: int) -> None:
    """Write the files that Linux has; ``limit=None`` is ``max``."""
    (root / "proc").mkdir(exist_ok=True)
    line = "" if kibibytes is None else f"MemAvailable:   {kibibytes} kB\n"
    (root / "proc/meminfo").write_text(f"MemTotal:       24 kB\n{line}HugePages_Total:       0\n")
    for names in FILES.values():
        for name in names[:3]:
            (root / "sys/fs/cgroup" / name).unlink(missing_ok=True)
    if groups is not None:
        *names, field = FILES[groups]
        texts = "max" if limit is None else str(limit), str(used), f"anon 5\n{field} {cached}\n"
        for name, text in zip(names, texts, strict=True):
            file = root / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


@given(SIZES, st.sampled_from([None, *FILES]), st.none() | SIZES, SIZES, SIZES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_available_memory_of_machine_and_container(
    tmp_path: Path, kibibytes: int, groups: str | None, limit: int | None, used: int, cached: int
) -> None:
    written(tmp_path, kibibytes, groups, limit, used, cached)
    left = [] if groups is None or limit is None else [limit - used + cached]
    assert available_bytes(tmp_path) == max(0, min([1024 * kibibytes, *left]))


def test_unknown_available_memory_skips_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes(tmp_path) is None
    written(tmp_path, None, "v2", 10, 0, 0)
    assert available_bytes(tmp_path) is None
    monkeypatch.setattr(_host_memory, "available_bytes", lambda: None)
    expect_host_memory(2**60, "parameters")


def test_oversized_parameters_raise_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    monkeypatch.setattr(_host_memory, "available_bytes", lambda: 4 * 65 * 64 * 4 - 1)
    with pytest.raises(MemoryError, match=r"keeps parameters .* needs 65\.0 KiB, but 65\.0 KiB are available"):
        GPipe(model, [2, 2], devices=["cpu"] * 2, offload=True, init="reset")
    assert all(each.is_meta for each in model.parameters())
    monkeypatch.setattr(_host_memory, "available_bytes", lambda: 4 * 65 * 64 * 4)
    with closing(GPipe(model, [2, 2], devices=["cpu"] * 2, offload=True, init="reset")) as pipe:
        assert not any(each.is_meta for each in pipe.parameters())


def test_oversized_gradients_raise_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, called = linears(4), list[nn.Module]()
    needed = sum(each.nbytes for each in layers.parameters())
    layers[0].register_forward_pre_hook(lambda module, inputs: called.append(module))
    monkeypatch.setattr(_host_memory, "available_bytes", lambda: needed - 1)
    with closing(GPipe(layers, [1] * 4, devices=["cpu:0"] * 4, offload=True)) as pipe:
        with pytest.raises(MemoryError, match="keeps gradients in the host's memory"):
            pipe.step(rows(), loss_fn=torch.sum, reduction="sum")
        assert not called
        pipe.evaluate(rows(), loss_fn=torch.sum, reduction="sum")
        layers[1].requires_grad_(False)
        pipe.step(rows(), loss_fn=torch.sum, reduction="sum")
        assert len(called) == 2

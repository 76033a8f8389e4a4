"""An interrupt at the end of a use of the process-wide cache leaves no user behind."""

from __future__ import annotations

import pytest

from gpipe._torch import get_parametrize_cache
from gpipe.checkpoint import _parametrized


@pytest.mark.parametrize("is_late", [False, True])
def test_interrupted_end_restores_cache(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    process, original, before = _parametrized._Process(), _parametrized.set_parametrized_cache, get_parametrize_cache()
    interrupts = [KeyboardInterrupt()]

    def restore(count: object, cache: object) -> None:
        if count is process or not interrupts:
            original(count, cache)
            return
        if is_late:
            original(count, cache)
        raise interrupts.pop()

    monkeypatch.setattr(_parametrized, "set_parametrized_cache", restore)
    with pytest.raises(KeyboardInterrupt), process.replaced():
        pass
    assert not interrupts
    assert get_parametrize_cache() == before
    assert not process._users
    with process.replaced():
        assert get_parametrize_cache() == (process, process)
    assert get_parametrize_cache() == before

"""What a thread does for pipes is kept in one place, thread by thread."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpipe
from gpipe._current import Current, current, setting

NAMES = sorted(Current.__annotations__.keys() | {"checkpointing", "recomputing", "graph_task"})


def now() -> dict[str, object]:
    return {name: getattr(current, name) for name in NAMES}


class LeftError(Exception):
    """What a block is left by."""


def nested(blocks: list[dict[str, int]]) -> None:
    """Enter the blocks one in another, and leave them all by an error."""
    if not blocks:
        raise LeftError
    before = now()
    try:
        with setting(**blocks[0]):
            assert now() == before | blocks[0]
            nested(blocks[1:])
    finally:
        assert now() == before


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers()), max_size=4))
def test_values_hold_inside_and_what_was_before_afterwards(blocks: list[dict[str, int]]) -> None:
    with pytest.raises(LeftError):
        nested(blocks)


def test_another_thread_has_values_of_its_own() -> None:
    with setting(microbatch=3, recomputing=True), ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(now).result(300)
        assert now() != theirs
    assert now() == theirs | {"skips": current.skips}
    assert theirs["skips"] is not current.skips


def test_nothing_else_is_kept_by_thread_or_context() -> None:
    found = [
        f"{path.name}: {line.strip()}"
        for path in Path(gpipe.__file__).parent.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"threading\.local|ContextVar\(", line)
    ]
    assert {line.partition(":")[0] for line in found} == {"_current.py", "_settings.py"}
    assert len(found) == 2, found

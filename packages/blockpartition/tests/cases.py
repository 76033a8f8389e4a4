"""Rows of examples."""

import pytest


def cases(names: str | tuple[str, ...], rows: list) -> pytest.MarkDecorator:
    """`parametrize` with numeric ids, because some tools reject test names that contain patterns and brackets."""
    return pytest.mark.parametrize(names, rows, ids=[str(i) for i in range(len(rows))])

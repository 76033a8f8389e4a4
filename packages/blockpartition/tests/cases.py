"""Rows of examples."""

import pytest


def cases(names: str | tuple[str, ...], rows: list) -> pytest.MarkDecorator:
    """`parametrize` with numbers for names: some tools choke on test names made of patterns and brackets."""
    return pytest.mark.parametrize(names, rows, ids=[str(i) for i in range(len(rows))])

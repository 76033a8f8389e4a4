"""The table of families on the page about models says what is measured."""

import pytest

from .families import EVERY
from .table import PAGE, row, rows

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("name", EVERY)
def test_a_family_does_what_the_page_says(name: str) -> None:
    """To update the page, run `python -m tests.frameworks.table`."""
    assert rows(PAGE.read_text())[name] == row(name)


def test_the_page_tells_of_every_family_in_order() -> None:
    assert list(rows(PAGE.read_text())) == list(EVERY)

"""The page of classes of transformers says what comes of them: equal to the plain model, or refused."""

import pytest

from .every_class import measured, told

EVERY = [*told()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if k % 40 else []) for k, name in enumerate(EVERY)]
)
def test_a_class_does_what_the_page_says(name: str) -> None:
    """If not, `python -m tests.frameworks.every_class` with the names of some classes writes the page anew."""
    assert measured(name) == told()[name]

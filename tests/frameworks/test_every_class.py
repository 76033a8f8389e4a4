"""The page of transformers classes is correct: equal to the plain model, or unsupported."""

import pytest

from .every_class import measured, told

EVERY = [*told()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if k % 40 else []) for k, name in enumerate(EVERY)]
)
def test_a_class_does_what_the_page_says(name: str) -> None:
    """To update the page, run `python -m tests.frameworks.every_class` with the names of the classes."""
    assert measured(name) == told()[name]

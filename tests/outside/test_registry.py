"""Models like PyTorch's own test models for pipelines match the plain model, however they are used."""

import pytest

from ..own_forward import EQUAL, outcomes, worst
from .registry import MODELS, case


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_the_plain_model_does(name: str) -> None:
    found = outcomes(case(name))
    assert worst(found) == EQUAL, found

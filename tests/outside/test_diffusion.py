"""Models of diffusers in a pipe: the numbers of the plain model, whatever way they are used."""

import pytest

from ..own_forward import EQUAL, outcomes, worst
from .diffusion import case, names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", names())
def test_a_model_computes_what_the_plain_model_does(name: str) -> None:
    found = outcomes(case(name))
    assert worst(found) == EQUAL, found

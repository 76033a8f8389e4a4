"""Models of timm in a pipe: the numbers of the plain model, whatever way they are used."""

import pytest

from ..own_forward import EQUAL, NotComparableError, outcomes, worst
from .pictures import case, names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", names())
def test_an_architecture_computes_what_the_plain_model_does(name: str) -> None:
    try:
        found = outcomes(case(name))
    except NotComparableError as error:
        pytest.skip(str(error))
    assert worst(found) == EQUAL, found

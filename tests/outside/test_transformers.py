"""Models of transformers, configured by its own tests, match the plain model or raise a clear error."""

import pytest

from ..own_forward import BARE, WRONG, NotComparableError, outcomes, worst
from .checkout import VARIABLE, case, cases, files, folder


@pytest.mark.skipif(folder() is None, reason=f"{VARIABLE} names no checkout of the repository of transformers")
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", files())
def test_classes_match_plain_model_or_raise(file: str) -> None:
    found = {}
    try:
        for name, test in cases(file):
            try:
                found[name] = outcomes(case(name, test))
            except NotComparableError:
                continue
    except NotComparableError as error:
        pytest.skip(str(error))
    if not found:
        pytest.skip("no class of it can be compared")
    assert not {name: each for name, each in found.items() if worst(each) in (BARE, WRONG)}

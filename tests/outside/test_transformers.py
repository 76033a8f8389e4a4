"""Models of transformers as its own tests configure them: the numbers of the plain model, or a refusal in words."""

import pytest

from ..own_forward import BARE, WRONG, NotComparableError, outcomes, worst
from .checkout import VARIABLE, case, cases, files, folder


@pytest.mark.skipif(folder() is None, reason=f"{VARIABLE} names no checkout of the repository of transformers")
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", files())
def test_each_class_computes_what_the_plain_model_does_or_is_refused(file: str) -> None:
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

from fractions import Fraction

import pytest

from blockpartition import Infeasible, Mode, Stage, place

from .cases import cases


@cases(
    ("arguments", "kind"),
    [
        ({}, int),
        ({"transfer": [0.5, 0.5]}, float),
        ({"transfer": [Fraction(1, 2)] * 2}, Fraction),
        ({"stages": [Stage(modes=[Mode("a", time=0.5)])] * 2}, float),
        ({"stages": [Stage(modes=[Mode("a", time=Fraction(1, 2))])] * 2}, Fraction),
        ({"stages": [Stage(modes=[Mode("a", time=[0.5, 0.5, 0.5])])] * 2}, float),
        ({"stages": [Stage(0.5), Stage(2)]}, float),
        ({"memory": [0.5] * 3, "stages": [Stage(capacity=9)] * 2}, int),
    ],
)
def test_times_are_of_the_kind_of_all_that_makes_them(arguments, kind):
    found = place([1, 1, 1], **{"stages": 2, **arguments})
    assert type(found.bottleneck) is kind
    assert {type(time) for time in found.times} == {kind}


def test_a_need_is_told_as_the_kind_of_number_it_was_given_as():
    with pytest.raises(Infeasible, match=r"^layer 1 needs 0\.75 at least"):
        place([1, 1], [Stage(capacity=0.5)] * 2, memory=[0.25, 0.75])

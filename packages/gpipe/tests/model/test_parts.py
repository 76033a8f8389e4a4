"""The stages together hold the entire model, under its own names."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from gpipe.model._blocks import divide
from gpipe.model._parts import build_parts

from .forwards import Told, models


@given(models(), st.integers(1, 5))
def test_parts_have_tensors_and_names_of_model(told: Told, stages: int) -> None:
    model = told.model()
    parts = build_parts(model, divide(model, stages))
    for kind in ("named_parameters", "named_buffers"):
        found = {name: each for part in parts for name, each in getattr(part, kind)(remove_duplicate=False)}
        expected = dict(getattr(model, kind)(remove_duplicate=False))
        assert found.keys() == expected.keys()
        assert all(found[name] is each for name, each in expected.items())


@given(models(), st.integers(1, 5))
def test_blocks_are_in_part_of_their_stage(told: Told, stages: int) -> None:
    model = told.model()
    division = divide(model, stages)
    blocks, balance, _ = division
    parts = build_parts(model, division)
    ends = [*accumulate(balance)]
    for k, (name, block) in enumerate(blocks.items()):
        stage = next(j for j, end in enumerate(ends) if k < end)
        assert [j for j, part in enumerate(parts) if part._modules.get(name) is block] == [stage]


@given(models(), st.integers(2, 5))
def test_modules_outside_blocks_follow_previous_block(told: Told, stages: int) -> None:
    model = told.model()
    division = divide(model, stages)
    parts = build_parts(model, division)
    first = {name for name, _ in parts[0].named_parameters()}
    last = {name for name, _ in parts[-1].named_parameters()}
    if not {"embed", "head"} & division.blocks.keys():
        assert {"embed.weight", "scale"} <= first
        assert {"norm.weight", "head.weight"} <= last

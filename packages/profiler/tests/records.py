"""Profiles out of thin air."""

from dataclasses import fields, replace

from hypothesis import strategies as st

from profiler import LayerProfile, Profile

_names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=6)
_bytes = st.integers(0, 2**50)
_seconds = st.floats(0, 1e4)


def layers(timed: bool) -> st.SearchStrategy[LayerProfile]:
    seconds = _seconds if timed else st.none()
    times = {"forward_seconds": seconds, "backward_seconds": seconds, "backward_input_seconds": st.none() | seconds}
    others = {field.name: _bytes for field in fields(LayerProfile)[2:]}
    return st.builds(LayerProfile, **{**others, **times, "name": _names, "kind": _names})


@st.composite
def profiles(draw: st.DrawFn, timed: st.SearchStrategy[bool] = st.booleans(), min_size: int = 1) -> Profile:  # noqa: B008
    """Return a profile of the same layers at one or several numbers of rows, with or without a loss."""
    ran, with_loss = draw(timed), draw(st.booleans())
    rows = sorted(draw(st.sets(st.integers(0, 4096), min_size=1, max_size=3)))
    first = draw(st.lists(layers(ran), min_size=min_size, max_size=4, unique_by=lambda x: x.name))
    found: list[Profile] = []
    for number in rows:
        again = [replace(draw(layers(ran)), name=layer.name) for layer in first] if found else first
        one = Profile(
            layers=tuple(again),
            device=draw(_names),
            torch=draw(_names),
            threads=draw(st.integers(1, 64)),
            chunks=draw(st.integers(1, 64)),
            rows=number,
            rounds=draw(st.integers(3, 99)) if ran else 0,
            loss=draw(layers(ran)) if with_loss else None,
        )
        found.append(one)
    return replace(found[-1], others=tuple(found[:-1]))

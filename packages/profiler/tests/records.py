"""Profiles out of thin air."""

from __future__ import annotations

from hypothesis import strategies as st

from profiler import LayerProfile, Profile

_names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=6)
_bytes = st.integers(0, 2**50)
_seconds = st.floats(0, 1e4)


def layers(timed: bool) -> st.SearchStrategy[LayerProfile]:
    seconds = _seconds if timed else st.none()
    return st.builds(
        LayerProfile,
        name=_names,
        kind=_names,
        forward_seconds=seconds,
        backward_seconds=seconds,
        trainable_bytes=_bytes,
        frozen_bytes=_bytes,
        buffer_bytes=_bytes,
        latent_bytes=_bytes,
        output_bytes=_bytes,
        peak_bytes=_bytes,
        flops=_bytes,
        allocated_bytes=st.none() | _bytes,
        allocated_peak_bytes=st.none() | _bytes,
    )


def profiles(timed: st.SearchStrategy[bool] = st.booleans(), min_size: int = 1) -> st.SearchStrategy[Profile]:  # noqa: B008
    return timed.flatmap(
        lambda timed: st.builds(
            Profile,
            layers=st.lists(layers(timed), min_size=min_size, max_size=4, unique_by=lambda x: x.name).map(tuple),
            device=_names,
            torch=_names,
            threads=st.integers(1, 64),
            chunks=st.integers(1, 64),
            rows=st.integers(0, 4096),
            rounds=st.integers(3, 99) if timed else st.just(0),
        )
    )

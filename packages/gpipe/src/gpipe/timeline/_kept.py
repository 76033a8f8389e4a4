"""What layers that run one after the other keep for their backwards."""

from __future__ import annotations

from collections.abc import Sequence

from profiler import LayerProfile


def kept_bytes(layers: Sequence[LayerProfile]) -> int:
    """What these layers leave alive together after a forward: what two of them hold counts once."""
    return sum(layer.saved_bytes for layer in layers) - sum(freed(layers))


def freed(layers: Sequence[LayerProfile]) -> list[int]:
    """What each layer frees of what the layers before it have made."""
    found, loose = [], 0
    for layer in layers:
        found.append(min(layer.freed_bytes, loose))
        loose = min(layer.passing_bytes, layer.saved_bytes + loose - found[-1])
    return found

"""Values that hooks inside of blocks collect for a model of Hugging Face: hidden states, attentions, router logits."""

from __future__ import annotations

import sys
from typing import Any

Collected = dict[str, Any]
"""By kind, the values so far. A kind may have another entry that says which of them count."""


def collector() -> Collected:
    """Return the collector of the model that runs now; an empty one if it collects nothing."""
    active = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    found: Collected | None = None if active is None else active.get()
    return found or {}

"""Values that hooks inside blocks collect for a Hugging Face model: hidden states, attentions, router logits."""

from __future__ import annotations

import sys
from typing import Any

Collected = dict[str, Any]
"""The values collected so far, by kind. An additional entry may list which values of a kind count."""


def collector() -> Collected:
    """Return the collector of the model that runs now; an empty one if it collects nothing."""
    active = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    found: Collected | None = None if active is None else active.get()
    return found or {}

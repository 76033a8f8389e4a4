"""What hooks inside of blocks collect for a model of Hugging Face: hidden states, attentions, the logits of routers.

While a model runs, hooks on its modules add to its collector. In a pipe each block runs by itself, with a collector
that begins with what was collected before it. Where the model goes on after its blocks, its own collector gets all.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ._inputs import Inputs

HOOKED = "_output_capturing_hooks_installed"
"""By this attribute models note that their modules have these hooks: it stays as the hooks do."""

_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments, and flags of a configuration, by which a model collects values while its blocks run."""

Collected = dict[str, Any]
"""By kind, what the calls so far have given; a kind may have another entry that says which of them count."""


def asked_of(model: nn.Module, inputs: Inputs, parts: Iterable[nn.Module] = ()) -> frozenset[str]:
    """What ``model`` collects: ``name=value`` for arguments in ``inputs``, names for flags of its configuration."""
    given = inputs.named(model.forward)
    configs = [vars(module).get("config") for module in (model, *parts)]
    arguments = {name: given[name] for name in _FLAGS if given.get(name) is not None}
    flags = [name for name in _FLAGS if name not in arguments and any(getattr(each, name, False) for each in configs)]
    return frozenset([*flags, *(f"{name}={value!r}" for name, value in arguments.items() if value)])


def expect_as_with_sample(asked: frozenset[str], sample: frozenset[str]) -> None:
    if asked != sample:
        raise ValueError(
            f"the model is asked for {_listed(asked)}, and its pipe was made with a sample that asks for "
            f"{_listed(sample)}; let both ask for the same, by arguments ({_first(asked ^ sample)}=False for none), or "
            "by model.config and those of its parts"
        )


def expect_returned(asked: frozenset[str], missing: Collection[str] | None) -> None:
    """Raise ValueError if the output of a pipe would not have what is ``asked``.

    Args:
        missing: the fields that it would not have; None if it is one field alone.
    """
    if asked and missing != []:
        found = "one field alone: name it by pick=..." if missing is None else f"all but {', '.join(missing)}"
        raise ValueError(
            f"the model is asked for {_listed(asked)}, and its pipe would return {found}; or pass "
            f"{_first(asked)}=False, or set it in model.config and those of its parts, and get these values of the "
            "plain model, or by hooks on its blocks"
        )


def _listed(asked: Collection[str]) -> str:
    return ", ".join(sorted(asked)) or "nothing from inside its blocks"


def _first(asked: Collection[str]) -> str:
    return min(asked).partition("=")[0]


def collector() -> Collected:
    """That of the model that runs now; empty if it collects nothing."""
    active = _active()
    found: Collected | None = None if active is None else active.get()
    return found or {}


@contextmanager
def collecting(before: Collected) -> Iterator[Collected]:
    """A context in which hooks add to the value, which goes on from ``before``."""
    collected, active = copied(before), _active()
    if active is None or not collected:
        yield collected
        return
    token = active.set(collected)
    try:
        yield collected
    finally:
        active.reset(token)


def copied(collected: Collected) -> Collected:
    return {kind: list(values) for kind, values in collected.items()}


def _active() -> Any:
    """The variable of transformers, if that is loaded and has one, by which hooks find their collector."""
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)

"""Choose the blocks of a model, their order and their balance: as given, by bytes, or by a run of a sample."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from microbatch import unwrap

from ..module._data import has_data
from ..module._inputs import Inputs
from ..module._partition import check_balance
from ._blocks import Blocks, Costs, Division, candidates, divide, find_named_blocks, reorder_blocks
from ._cache import expect_same_without_cache
from ._elsewhere import first_line
from ._order import find_order
from ._pick import Pick

_log = logging.getLogger("gpipe")


def divide_model(
    model: nn.Module,
    balance: Iterable[int] | None,
    names: str | Sequence[str] | None,
    stages: Callable[[], int],
    sample: Any = None,
    seconds: Callable[[Blocks], Costs | None] = lambda blocks: None,
) -> Division:
    """Return the blocks of ``model`` and their balance.

    Args:
        balance: the number of blocks of each stage, if it is given.
        names: the names of the blocks, or of lists of them, if they are given.
        stages: returns the number of stages for a balance that is not given.
        sample: an input of the model, used to find the order in which it uses its modules.
        seconds: measures the costs of modules that may be blocks, with the sample.
    """
    given, costs = [names] if isinstance(names, str) else names, None
    if balance is None:
        if sample is not None and has_data(model):
            costs = seconds(candidates(model, given))
        division = divide(model, stages(), given, costs)
    else:
        blocks = divide(model, 1).blocks if given is None else find_named_blocks(model, given)
        division = Division(blocks, check_balance(balance, len(blocks)), {})
    if sample is None or len(division.balance) == 1:
        return division
    try:
        order = find_order(model, division.blocks, Inputs.of(unwrap(sample)[0]))
    except Exception as error:
        _log.info(
            "the order in which %s uses its modules is not known, because its forward does not run without data (%s); "
            "it is taken to be the order in which they are registered",
            type(model).__name__,
            first_line(error),
        )
        return division
    found = reorder_blocks(order, model, division, costs, moves=given is None)
    return found if balance is None else found._replace(balance=division.balance)


def seconds_on(
    devices: Sequence[torch.device], model: nn.Module, blocks: Blocks, sample: Any, pick: Pick
) -> Costs | None:
    """Return the measured costs of blocks; None if there is one stage, or if the model does not fit on one device."""
    if len(devices) == 1:
        return None
    from ..balance._balance import intra_op_threads  # imported here, because pipes without a sample measure nothing
    from ._measure import compute_seconds, measure_rounds

    inputs = Inputs.of(unwrap(sample)[0])
    expect_same_without_cache(model, inputs)
    device = next((each for each in devices if each.type != "cpu"), devices[0])
    # Stages compute at the same time, each with its share of the threads.
    with intra_op_threads(max(1, torch.get_num_threads() // len(devices))):
        try:
            rounds = measure_rounds(model, blocks, inputs, device, pick)
        except torch.OutOfMemoryError:
            _log.warning(
                "%s does not fit on %s as a whole, so that its blocks are balanced by bytes; give balance=, the number "
                "of blocks of each stage",
                type(model).__name__,
                device,
            )
            return None
    return partial(compute_seconds, rounds)

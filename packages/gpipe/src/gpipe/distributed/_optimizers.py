"""Optimizer state keyed by parameter name, so that each rank finds the state of its own parameters.

The keys are those of ``torch.distributed.checkpoint.state_dict``: ``state.<name>.<key>`` and
``param_groups.<name>.<option>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Any]

_MEMBERS = {"params", "param_names"}
"""Keys of a parameter group that are not options."""


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the state dict. A shared parameter has several names."""
    found = module.state_dict(keep_vars=True).items()
    return {name: value for name, value in found if isinstance(value, nn.Parameter)}


def names_in(module: nn.Module, optimizer: Optimizer) -> list[list[list[str]]]:
    """Return the names in ``module`` of each parameter in each group of ``optimizer``; ValueError if one has none."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in parameters_by_name(module).items():
        names.setdefault(parameter, []).append(name)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"optimizer: has a parameter of shape {tuple(parameter.shape)} that is not a parameter of the "
                    f"{type(module).__name__}; create it from parameters() of the module that is saved or loaded"
                )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def by_name(module: nn.Module, optimizer: Optimizer) -> State:
    """Return the state of ``optimizer``, keyed by the names of its parameters in ``module``."""
    found: State = {"class": type(optimizer).__name__, "state": {}, "param_groups": {}}
    saved = optimizer.state_dict()
    for group, members in zip(saved["param_groups"], names_in(module, optimizer), strict=True):
        options = {key: value for key, value in group.items() if key not in _MEMBERS}
        for index, names in zip(group["params"], members, strict=True):
            found["param_groups"] |= dict.fromkeys(names, options)
            found["state"] |= dict.fromkeys(names, saved["state"].get(index, {}))
    return found


def find_options(module: nn.Module, optimizer: Optimizer, found: Mapping[str, Any]) -> list[State | None]:
    """Return the saved options of each parameter group of ``optimizer``; None for a group without parameters.

    Raises:
        ValueError: the saved state is of another class of optimizer, or does not fit the parameters or their groups.
    """
    own = type(optimizer).__name__
    if found.get("class", own) != own:
        raise ValueError(f"optimizer: the checkpoint has the state of {found['class']}, but this optimizer is {own}")
    members = names_in(module, optimizer)
    known = [[_find_name(names, found) for names in each] for each in members]
    return [_options(each, found["param_groups"]) if each else None for each in known]


def options_of_all(options: Sequence[Sequence[State | None]], members: Sequence[int]) -> list[State]:
    """Return the options of each parameter group, from the members that have parameters in it.

    A group may have no parameters on a rank, such as that of embeddings. A scheduler and ``add_param_group`` use its
    options nevertheless.

    Args:
        options: the results of :func:`find_options` of all members with an optimizer.
        members: their global ranks.

    Raises:
        ValueError: a group has no parameters on a member, and members have different numbers of groups, so that it is
            not known which groups correspond.
    """
    empty = [rank for rank, groups in zip(members, options, strict=True) if None in groups]
    other = next((rank for rank, groups in zip(members, options, strict=True) if len(groups) != len(options[0])), None)
    if empty and other is not None:
        raise ValueError(
            f"optimizer: a group of rank {empty[0]} has no parameters, so it has the options of the same group on "
            f"other ranks, but rank {other} has a different number of groups than rank {members[0]}; create the "
            "same groups, in the same order, on all ranks"
        )
    if other is not None:
        return []
    return [next((each for each in same if each is not None), {}) for same in zip(*options, strict=True)]


def from_names(
    module: nn.Module, optimizer: Optimizer, found: Mapping[str, Any], of_empty: Sequence[State] = ()
) -> State:
    """Convert states by name to a state dict for ``optimizer.load_state_dict``, after :func:`find_options`.

    Args:
        found: the result of :func:`by_name` when the state was saved, possibly with parameters of other ranks.
        of_empty: for each group, the options to set if it has no parameters.
    """
    saved = optimizer.state_dict()
    state: dict[int, State] = {}
    groups = []
    for k, (group, members) in enumerate(zip(saved["param_groups"], names_in(module, optimizer), strict=True)):
        known = [_find_name(names, found) for names in members]
        state |= {
            index: found["state"][name]
            for index, name in zip(group["params"], known, strict=True)
            if name in found["state"]
        }
        options = _options(known, found["param_groups"]) if known else of_empty[k] if of_empty else {}
        groups.append({**group, **options})
    return {**saved, "state": state, "param_groups": groups}


def _find_name(names: Sequence[str], found: Mapping[str, Any]) -> str:
    for name in names:
        if name in found["param_groups"]:
            return name
    raise ValueError(
        f"optimizer: the checkpoint has no state of {names[0]!r}, which was not in the optimizer that was saved"
    )


def _options(names: Sequence[str], groups: Mapping[str, State]) -> State:
    for name in names[1:]:
        for key, value in groups[names[0]].items():
            other = groups[name].get(key)
            if other is not value and other != value:
                raise ValueError(
                    f"optimizer: {names[0]!r} and {name!r} are in one group, but the checkpoint has {key}={value!r} "
                    f"for the first and {other!r} for the second; create the same groups as when it was saved"
                )
    return groups[names[0]]

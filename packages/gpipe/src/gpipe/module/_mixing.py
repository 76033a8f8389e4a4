"""Name layers of other libraries that compute a row from all rows of a micro-batch.

In micro-batches they compute something else than for the full mini-batch, as in a plain loop over micro-batches. They
are known by their classes; ``gpipe.check`` finds any others by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn


def mixing_layers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of such layers that are trained, and what each does with all rows."""
    for name, module in model.named_modules():
        kind = type(module)
        find = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
        found = None if find is None or not module.training else find(module)
        if found is not None:
            yield name, f"{kind.__qualname__} {found}"


def _float8(layer: nn.Module) -> str | None:
    """Scales are per tensor by default; with the recipe ``rowwise`` each row has its own."""
    granularity = getattr(getattr(layer.config, "cast_config_input", None), "scaling_granularity", None)
    if getattr(granularity, "name", None) != "TENSORWISE":
        return None
    return "scales its input by the largest value of all rows; Float8LinearConfig.from_recipe_name('rowwise') does not"


_KNOWN: dict[str, Callable[[nn.Module], str | None]] = {
    "torchao.float8.float8_linear.Float8Linear": _float8,
    "peft.tuners.lily.layer.Linear": lambda _: "chooses its experts by the mean of all rows",
}

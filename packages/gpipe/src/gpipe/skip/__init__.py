"""Skip connections: a layer stashes a tensor, and a later layer, on any stage, pops it.

The tensor does not pass through the stages in between. The same layers work in a plain ``nn.Sequential``.

>>> import torch
>>> from torch import nn
>>> @skippable(stash=["input"])
... class Keep(nn.Module):
...     def forward(self, x):
...         yield stash("input", x)
...         return x * 2
>>> @skippable(pop=["input"])
... class Add(nn.Module):
...     def forward(self, x):
...         skip = yield pop("input")
...         return x + skip
>>> nn.Sequential(Keep(), nn.Identity(), Add())(torch.ones(1))
tensor([3.])
"""

from .layout import SkipLayout as SkipLayout
from .layout import inspect_skip_layout as inspect_skip_layout
from .namespace import Namespace as Namespace

# The module of the same name must be imported before the function replaces it here.
from .skippable import Skippable as Skippable
from .skippable import pop as pop
from .skippable import skippable as skippable
from .skippable import stash as stash
from .skippable import verify_skippables as verify_skippables

__all__ = [
    "Namespace",
    "SkipLayout",
    "Skippable",
    "inspect_skip_layout",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]

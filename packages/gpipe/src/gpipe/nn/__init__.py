"""Modules that a pipe can split inside: residual blocks and nested containers.

A pipe is split between the layers of an ``nn.Sequential``. :func:`flatten_nested` replaces containers by their layers,
so that a partition may start inside them:

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(2, 4), nn.Sequential(Residual(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)))
>>> list(dict(flatten_nested(model).named_children()))
['0', '1_0_fork', '1_0_0', '1_0_1', '1_0_join', '1_1']
>>> list(flatten_nested(model).state_dict()) == list(model.state_dict())
True

For models whose ``forward`` is more than a sequence of such parts there is :func:`gpipe.flatten`.
"""

from ._nested import flatten_nested as flatten_nested
from ._residual import Residual as Residual

__all__ = ["Residual", "flatten_nested"]

"""A model with its own forward, which calls the elements of a list."""

from typing import Any

from torch import nn


class Listed(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.blocks[0](*args, **kwargs)
        for block in self.blocks[1:]:
            found = block(found)
        return found

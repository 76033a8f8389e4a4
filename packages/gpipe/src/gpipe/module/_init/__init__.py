"""Initialize a model built on ``meta``, layer by layer, each layer on its own device."""

from ._initializer import Initializer as Initializer
from ._initializer import Loaded as Loaded
from ._initializer import get_initializer as get_initializer
from ._materialize import expect_materializable as expect_materializable
from ._materialize import materialize as materialize
from ._offloaded import take_off_hooks as take_off_hooks

__all__ = ["Initializer", "Loaded", "expect_materializable", "get_initializer", "materialize", "take_off_hooks"]

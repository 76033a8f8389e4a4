"""Initialise a model that was built on the device ``meta``, layer by layer, each on its own device."""

from ._materialize import expect_materializable as expect_materializable
from ._materialize import materialize as materialize
from ._means import Means as Means
from ._means import means_of as means_of

__all__ = ["Means", "expect_materializable", "materialize", "means_of"]

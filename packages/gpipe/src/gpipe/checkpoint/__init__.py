"""Everything that makes a recomputation repeat its forward exactly: state, random numbers, checks."""

from ._phase import is_checkpointing as is_checkpointing
from ._phase import is_recomputing as is_recomputing

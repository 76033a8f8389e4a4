"""What a recomputation needs to repeat a forward exactly."""

from ._phase import is_checkpointing as is_checkpointing
from ._phase import is_recomputing as is_recomputing

"""Choose how many layers each partition gets, so that all partitions cost about the same.

All functions return a list for `GPipe`'s ``balance`` that is optimal for the costs they determine: no balance has a
cheaper most expensive partition.
"""

from ._balance import balance_by_flops as balance_by_flops
from ._balance import balance_by_parameters as balance_by_parameters
from ._balance import balance_by_size as balance_by_size
from ._balance import balance_by_time as balance_by_time
from ._balance import balance_cost as balance_cost
from ._balance import uniform as uniform

__all__ = ["balance_by_flops", "balance_by_parameters", "balance_by_size", "balance_by_time", "balance_cost", "uniform"]

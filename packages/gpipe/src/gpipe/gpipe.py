"""Aliases for code written for torchgpipe: :class:`gpipe.GPipe` and the functions that check and split models."""

from ._gpipe import GPipe as GPipe
from .module._partition import BalanceError as BalanceError
from .module._partition import recommend_auto_balance as recommend_auto_balance
from .module._partition import split_module as split_module
from .module._partition import verify_module as verify_module

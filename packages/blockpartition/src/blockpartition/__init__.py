"""Cut a sequence of costs into contiguous blocks whose largest sum is the least possible, with a proof."""

__version__ = "0.1.0"

"""Cut a mini-batch into micro-batches and put it together again."""

__version__ = "0.1.0"

"""A model whose own forward runs, once per micro-batch, and is cut while it runs."""

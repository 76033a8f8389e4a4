"""Pipes of models whose own forward runs once per micro-batch, and is split while it runs."""

"""Runs a pipeline: a ``Pipeline`` makes a ``Run``, whose ``StageRun`` computes the ``Cell`` of each micro-batch."""

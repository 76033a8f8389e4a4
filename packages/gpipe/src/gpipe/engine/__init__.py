"""Runs a pipeline: ``Pipeline`` makes a ``Run``, in which a ``StageRun`` computes the ``Cell`` of each
micro-batch.
"""

"""Runs a pipeline: ``Pipeline`` makes a ``Run``, in which ``StageRunner`` computes the ``Cell`` of each
micro-batch.
"""

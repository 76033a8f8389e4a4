"""Runs a pipeline.

A ``Pipeline`` describes a run by a ``RunSpec``; :mod:`._mini_batch` makes a ``Run`` of it, with a ``StageRun`` for each
stage, and a ``Cell`` for each micro-batch on a stage.
"""

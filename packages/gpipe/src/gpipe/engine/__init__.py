"""Walks the programs of all stages: pipeline, run, stage runner, cell."""

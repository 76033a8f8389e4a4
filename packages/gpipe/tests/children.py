"""Forks of the process that runs the tests."""

from packages.streams.tests.fakes import in_child as in_child

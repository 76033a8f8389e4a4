"""How fast the house is, and what it keeps in memory: `python -m benchmarks`, or `nox -s bench` for everything."""

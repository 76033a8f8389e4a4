"""How fast the packages are, and what they keep in memory: `python -m benchmarks`, or `nox -s bench` for everything."""

"""Speed and memory benchmarks of all packages: `python -m benchmarks`, or `nox -s bench` for everything."""

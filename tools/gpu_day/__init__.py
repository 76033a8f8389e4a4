"""Ten minutes of a machine with GPUs: tests, benchmarks and a real model, on one page."""

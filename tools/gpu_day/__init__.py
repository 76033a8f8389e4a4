"""A day on a GPU in four parts: tests, sanitizers, measurements and real models, with a page for each part."""

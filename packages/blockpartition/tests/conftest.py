"""Settings for running these tests standalone, from the package's own archive."""

from hypothesis import settings

if settings.default.deadline is not None:
    # The examples of the repository's own runs.
    settings.register_profile("fixed", max_examples=10, derandomize=True, deadline=None, database=None)
    settings.load_profile("fixed")

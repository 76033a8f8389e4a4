"""What these tests need where they are run by themselves, from the package's own archive."""

import pytest
from hypothesis import settings

if settings.default.deadline is not None:
    # The examples of the repository's own runs.
    settings.register_profile("fixed", max_examples=25, derandomize=True, deadline=None, database=None)
    settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: runs only in the long session (pytest -m long)")
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: a limit in seconds, kept where pytest-timeout is installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" in config.getoption("-m"):
        return
    for item in items:
        if "long" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="long: run with -m long"))

"""What these tests need where they are run by themselves, from the package's own archive."""

import pytest
from hypothesis import Phase, settings

if settings.default.deadline is not None:
    settings.register_profile("blockpartition", deadline=None, max_examples=100)
    settings.load_profile("blockpartition")

# A mutant has to fall quickly, not to be explained well: few examples, none made smaller.
settings.register_profile(
    "mutation", deadline=None, max_examples=8, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)


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

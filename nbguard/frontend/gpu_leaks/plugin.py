"""The options and the marker of `pytest --gpu-leaks`, and the cards of tests that ran out of memory.

Every run of pytest imports this file, and only that option, and `nbguard.install()` in a conftest, the rest.
"""

from __future__ import annotations

import sys

import pytest

_MARKER = (
    "gpu_memory(peak=None, keeps=None): with --gpu-leaks, the test fails when its tensors take more than `peak` at a time, "
    "and may leave as much as `keeps`, such as '2GiB'"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options to pytest's."""
    group = parser.getgroup("gpu-leaks", "memory of tensors that tests leave behind (nbguard)")
    group.addoption(
        "--gpu-leaks",
        action="store_true",
        help="fail a test that leaves memory of tensors behind, and name the holder; without a GPU, tensors on the CPU count",
    )
    group.addoption("--gpu-leaks-min", metavar="SIZE", default="1MiB", help="size that makes a leak (1MiB)")
    group.addoption(
        "--gpu-leaks-lines",
        action="store_true",
        help="also name the line that allocated it; each operation of the tests takes longer",
    )
    group.addoption("--gpu-leaks-json", metavar="FILE", help="write the leaks and peaks of all tests to a file, as JSON")
    group.addoption("--gpu-leaks-comment", metavar="FILE", help="write them to a file as Markdown, for a pull request")
    group.addoption("--gpu-leaks-base", metavar="JSON", help="the file of another branch that the comment compares with")


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker, and watch the tests where that was asked for."""
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("--gpu-leaks"):
        if pytest.version_tuple < (8,):
            raise pytest.UsageError(f"--gpu-leaks needs pytest 8 or later, and this is {pytest.__version__}")
        from nbguard.frontend.gpu_leaks.watch import watch_tests

        watch_tests(config)
    install = sys.modules.get("nbguard.frontend.jobs.install")
    if install is not None and install.is_installed():
        from nbguard.frontend.jobs.cards_of_tests import CardsOfTests

        config.pluginmanager.register(CardsOfTests(), "nbguard-cards")

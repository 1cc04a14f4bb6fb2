"""The out-of-memory cards of tests. Pytest catches their errors itself, and shows each card below the traceback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbguard.frontend.jobs.install import words


class CardsOfTests:
    """A plugin of pytest that adds the card of a test to its report, where it ran out of memory."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Add the card to the report of a phase that failed."""
        outcome: Any = yield
        report = outcome.get_result()
        if report.failed and call.excinfo is not None and isinstance(call.excinfo.value, Exception):
            said = words(call.excinfo.value)
            if said:
                report.sections.append(("nbguard", said))

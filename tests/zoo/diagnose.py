"""Building a case in a kernel, and diagnosing what a cleanup did to it."""

from __future__ import annotations

import re

import pytest

from tests.kernels import Kernel
from tests.thorough import THOROUGH
from tests.zoo.cases import Case

_TRUTH = "{name: [gone() for gone in found] for name, found in builtins._tracked.items()}"
_COLLECTED_TRUTH = f"(gc.collect(), {_TRUTH})[1]"


_WHOLE = 8
"""Of so many tests of a kind one is with looks at the whole heap."""


def without_libraries(test: pytest.FixtureRequest) -> bool:
    """Say whether a parametrized test's looks leave out the half a million objects of libraries: in no thorough run.

    They take a quarter of the time so.
    """
    spec = test.node.callspec
    case = spec.params.get("case")
    is_whole = spec.indices["seed" if case is None else "case"] % _WHOLE == _WHOLE // 2
    return not (THOROUGH or is_whole or (case is not None and case.by_library))


def build(kernel: Kernel, case: Case) -> None:
    """Run the case's cells, and see that all they track is alive."""
    # Python's own collector has no reason to run before the cleanup then.
    kernel.client.execute_interactive("__import__('gc').collect()", silent=True, store_history=False)
    for number, source in enumerate(case.cells, start=1):
        cell = kernel.run(source, inputs=case.inputs)
        assert (cell.error is not None) == (number in case.errors), cell.error
    before = kernel.value(_TRUTH)
    for name in case.want:
        assert not any(before[name]), f"{name} was gone before the cleanup"


def diagnose(kernel: Kernel, case: Case, text: str) -> None:
    """Compare what is gone with the case's truth; `text` is what the cleanup said."""
    after = kernel.value(_COLLECTED_TRUTH)
    for name, want in case.want.items():
        if want == "freed":
            assert all(after[name]), f"{name} is still alive\n{text}"
        else:
            assert not any(after[name]), f"{name} was lost\n{text}"
        if want == "reported":
            assert re.search(case.holder, text), text
    freed, promised = _bytes(text)
    if case.measured:
        assert "measured after" in text, text
    else:
        assert freed == promised or (case.hidden and freed == "more than"), text


def _bytes(text: str) -> tuple[str, str]:
    """Return what the outcome says was freed and promised, as shown; nothing stale counts as kept."""
    found = re.search(r"freed (\S+ \S+) of (\S+ \S+) promised(, and)?", text)
    if found is None:
        assert "nothing was stale" in text or "frees nothing" in text, text
        return "0 B", "0 B"
    return ("more than", "promised") if found[3] else (found[1], found[2])

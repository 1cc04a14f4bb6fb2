"""Every case of the zoo in a real kernel, with nbguard loaded before the state is built and only for the cleanup."""

from __future__ import annotations

import re

import pytest

from tests.kernels import Kernel
from tests.zoo.cases import CASES, PRELUDE, Case
from tests.zoo.more_cases import MORE_CASES

_TRUTH = "{name: [gone() for gone in found] for name, found in builtins._tracked.items()}"
_COLLECTED_TRUTH = f"(gc.collect(), {_TRUTH})[1]"


@pytest.mark.parametrize("loaded_first", [True, False], ids=["loaded before", "loaded for the cleanup"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(kernel: Kernel, case: Case, loaded_first: bool) -> None:
    _run(kernel, case, loaded_first)


@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_more(kernel: Kernel, case: Case) -> None:
    _run(kernel, case, loaded_first=False)


def _run(kernel: Kernel, case: Case, loaded_first: bool) -> None:
    kernel.run(PRELUDE).ok()
    if loaded_first:
        kernel.run("get_ipython().run_line_magic('load_ext', 'nbguard'); None").ok()
        kernel.client.execute_interactive("get_ipython().execution_count -= 1", silent=True, store_history=False)
    for number, source in enumerate(case.cells, start=1):
        cell = kernel.run(source, inputs=case.inputs)
        assert (cell.error is not None) == (number in case.errors), cell.error
    before = kernel.value(_TRUTH)
    for name in case.want:
        assert not any(before[name]), f"{name} was gone before the cleanup"

    cell = kernel.run(f"%load_ext nbguard\n%reset_gpu {case.stale}").ok()

    after = kernel.value(_COLLECTED_TRUTH)
    for name, want in case.want.items():
        if want == "freed":
            assert all(after[name]), f"{name} is still alive\n{cell.text}"
        else:
            assert not any(after[name]), f"{name} was lost\n{cell.text}"
        if want == "reported":
            assert re.search(case.holder, cell.text), cell.text
    freed, promised = _bytes(cell.text)
    assert freed == promised if not case.measured else "measured after" in cell.text, cell.text
    if case.check:
        kernel.run(case.check).ok()


def _bytes(text: str) -> tuple[str, str]:
    """Return what the outcome says was freed and promised, as shown; nothing stale counts as kept."""
    found = re.search(r"freed (\S+ \S+) of (\S+ \S+) promised(, and)?", text)
    if found is None:
        assert "nothing was stale" in text, text
        return "0 B", "0 B"
    return ("more than", "promised") if found[3] else (found[1], found[2])

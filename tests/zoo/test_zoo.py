"""Every case of the zoo in a real kernel, with nbguard loaded before the state is built or only for the cleanup.

Both for each of CASES in a thorough run only (`tests/thorough.py`).
"""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import half_in_ci, spread
from tests.zoo.cases import CASES, PRELUDE, SHOWS_SMALL, Case
from tests.zoo.diagnose import build, diagnose
from tests.zoo.more_cases import MORE_CASES


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loaded_before(kernel: Kernel, case: Case) -> None:
    _run(kernel, case, loaded_first=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*spread(CASES, 4), *half_in_ci(MORE_CASES)], ids=lambda case: case.name)
def test_loaded_for_the_cleanup(kernel: Kernel, case: Case) -> None:
    _run(kernel, case, loaded_first=False)


_COMPARE = "__import__('tests.zoo.both_walks', fromlist=['compare']).compare()"


def _run(kernel: Kernel, case: Case, loaded_first: bool) -> None:
    kernel.run(PRELUDE if loaded_first else PRELUDE.removeprefix(SHOWS_SMALL)).ok()
    if loaded_first:
        kernel.run("get_ipython().run_line_magic('load_ext', 'nbguard'); None").ok()
        kernel.client.execute_interactive("get_ipython().execution_count -= 1", silent=True, store_history=False)
    build(kernel, case)
    cell = kernel.run(f"{SHOWS_SMALL}\n%load_ext nbguard\n{_COMPARE}\n%reset_gpu {case.stale}").ok()
    diagnose(kernel, case, cell.text)
    if case.check:
        kernel.run(case.check).ok()

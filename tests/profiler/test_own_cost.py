"""The cost of a profile as its report states it: the whole, by parts, and without libraries that the fit has no use for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from nbguard.memory.scan.devices.counters import heap_reader
from nbguard.training.profiler.profile import FitProfile
from nbguard.units import KiB

_CELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbguard")
shell.run_cell("import torch; model = torch.nn.Linear(4, 1); opt = torch.optim.SGD(model.parameters(), 0.1)").raise_error()
loop = "for _ in range(20): model(torch.ones(8, 4)).sum().backward(); opt.step(); opt.zero_grad()"
shell.run_cell("%%profile_fit -o report" + chr(10) + loop).raise_error()
cost = shell.user_ns["report"].overhead
assert cost.before > 0 and cost.after > 0, cost
needless = ("fastai", "nbguard.memory.cleanup.plan", "nbguard.memory.reports.cell_ledger", "nbguard.training.ranks.job_board")
print(*(name for name in needless if name in sys.modules))
"""

_AGAIN = """
import gc
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbguard")
shell.run_cell("import torch; model = torch.nn.Linear(4, 1); opt = torch.optim.SGD(model.parameters(), 0.1)").raise_error()
from nbguard.memory.scan.devices.counters import heap_reader
loop = "for _ in range(20): model(torch.ones(8, 4)).sum().backward(); opt.step(); opt.zero_grad()"
read, after = heap_reader(), []
for _ in range(5):
    shell.run_cell("%%profile_fit -o report" + chr(10) + loop).raise_error()
    gc.disable()
    after.append(read())
print(after[-1] - after[-2])
"""


def profiled(spent: int = 0) -> FitProfile:
    profile = FitProfile(spent=spent)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    profile.start()
    for _ in range(20):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    profile.finish()
    return profile


def test_the_cost_is_of_before_during_and_after_the_fit() -> None:
    profile = profiled()
    cost, own = profile.report.overhead, profile.observations.own
    assert min(cost.before, cost.during, cost.after) > 0
    assert cost.total == cost.before + cost.during + cost.after
    assert cost.share == cost.total / max(own.process - cost.during, 1)
    assert (cost.before, cost.after) == (own.before, own.after)


def test_the_cost_has_what_was_spent_before_the_profile_was_made() -> None:
    assert profiled(spent=10**12).report.overhead.before > 10**12


@pytest.mark.slow
def test_a_profile_of_a_loop_imports_no_library_and_no_room_that_it_has_no_use_for() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _CELL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.slow
@pytest.mark.skipif(heap_reader() is None, reason="this system's malloc does not tell how much is in use")
def test_a_profile_leaves_little_behind_before_the_next_collection() -> None:
    """The notices look at the heap after a cell that leaves half a MiB more each time it is run, and would blame the user's."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _AGAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 128 * KiB

"""The line, its marks and what fits, on the device: spikes, failed requests, cells in a row, another notebook beside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cuda.conftest import Notebook
from tests.kernel.conftest import held
from tests.kernels import Kernel
from tests.panels import Message, Panel

MIB = 1024**2
ALWAYS = "from nbguard.frontend.sidebar.hub import sampler; sampler.SHARE, sampler._SHORT = 1.0, 1e9"
NEVER = """
from nbguard.frontend.sidebar.hub import sampler
sampler.SHARE = sampler._SHORT = sampler.OF_ITS_CELL = sampler._UNFELT = 1e-9
"""
COUNT = """
import nbguard.memory.scan.scan as _scanning
_scan_of_nbguard, scans = _scanning._scan_without_collecting, []
def _counted(*args):
    scans.append(args[0].is_running)
    return _scan_of_nbguard(*args)
_scanning._scan_without_collecting = _counted
"""


@contextlib.contextmanager
def panel_of(kernel: Kernel) -> Iterator[Panel]:
    panel = Panel(kernel)
    panel.hello()
    try:
        yield panel
    finally:
        panel.stop()


def cell(panel: Panel, number: int) -> Message:
    """Return the mark of a cell, once it has ended."""
    ended = panel.until(lambda tick: any(mark["cell"] == number and mark["end"] is not None for mark in tick["marks"]))
    found: Message = next(mark for mark in ended["marks"] if mark["cell"] == number and mark["kind"] == "cell")
    return found


def history(panel: Panel, seconds: int = 0) -> Message:
    found: Message = panel.wait("history", rid=panel.ask("history", seconds=seconds))["history"]
    return found


def run_all(kernel: Kernel, cells: list[str]) -> None:
    """Ask for cells as Run All does: all at once."""
    for each in cells:
        kernel.client.execute(each)


def test_a_cell_has_its_peak_and_the_line_has_the_spike(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("kept = mib(100)").ok()
    with panel_of(kernel) as panel:
        panel.until(lambda tick: tick["devices"])
        kernel.run("spike = mib(700); del spike").ok()  # 4
        high = cell(panel, 4)
        kernel.run("spike = mib(300); del spike").ok()
        lower = cell(panel, 5)
        points = history(panel)["lines"][0]["points"]

    assert high["peaks"] == [["cuda:0", 800 * MIB, True]]
    ((_, least, is_exact),) = lower["peaks"]
    assert (least >= 100 * MIB, least <= 400 * MIB, is_exact) == (True, True, False)
    assert max(point[3] for point in points) == 800 * MIB
    assert points[-1][4] == 100 * MIB
    assert kernel.value("torch.cuda.max_memory_allocated()") == 800 * MIB  # and nobody has reset it


def test_a_failed_request_is_a_mark_beside_the_peak_of_its_cell(notebook: Notebook) -> None:
    kernel = notebook(bytes=2 << 30)
    with panel_of(kernel) as panel:
        kernel.run("torch.cuda.init()").ok()
        panel.until(lambda tick: tick["devices"])
        kernel.run("first = mib(900); second = mib(5000)")  # 4
        failed = cell(panel, 4)
        requests = [mark for mark in history(panel)["marks"] if mark["kind"] == "request"]

    assert failed["peaks"] == [["cuda:0", 900 * MIB, True]]
    ((asked, of, device),) = ((mark["nbytes"], mark["cell"], mark["device"]) for mark in requests)
    assert (asked, of, device) == (5000 * MIB, 4, "cuda:0")


def test_cells_one_after_another_are_looked_at_between(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(COUNT + ALWAYS).ok()  # 3
    with panel_of(kernel) as panel:
        kernel.run("t0 = mib(10)").ok()
        panel.heap(lambda heap: heap["cell"] == 4)
        hold = "import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.01)"
        run_all(kernel, [*(f"t{n} = mib({100 + n})" for n in range(1, 7)), hold])  # 5 … 10, 11
        between = panel.heap(lambda heap: heap["cell"] == 10)
        during = panel.until(lambda tick: tick["cell"] == 11)
        (kernel.cwd / "enough").touch()
        panel.until(lambda tick: not tick["busy"])
        beside = kernel.value("[is_running for is_running in scans if is_running]")

    assert {row["label"] for row in between["holders"]} >= {f"t{n}" for n in range(7)}
    assert between["during"] is None
    assert (during["heap"], during["heap_cell"]) == (between["heap"], 10)
    assert during["devices"][0]["fits"] is not None  # nothing has changed since
    assert beside == []  # no cell was looked at while it ran


def test_looks_that_would_cost_too_much_are_put_off_until_it_is_quiet_and_figures_keep_their_date(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(COUNT + NEVER).ok()  # 3
    with panel_of(kernel) as panel:
        kernel.run("t0 = mib(10)").ok()
        before = panel.heap(lambda heap: heap["cell"] == 4)
        hold = "import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.01)"
        run_all(kernel, [*(f"t{n} = mib({100 + n})" for n in range(1, 7)), hold])
        during = panel.until(lambda tick: tick["cell"] == 11)
        (kernel.cwd / "enough").touch()
        after = panel.heap(lambda heap: heap["cell"] == 11)

    assert (during["heap"], during["heap_cell"]) == (before["heap"], 4)
    assert during["devices"][0]["fits"] is None  # it would be of before these cells
    assert {row["label"] for row in after["holders"]} >= {f"t{n}" for n in range(7)}


def test_a_look_in_the_middle_of_a_cell_says_so(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("t0 = mib(10)").ok()  # 3
    with panel_of(kernel) as panel:
        panel.heap(lambda heap: heap["heap"] > 0)
        with held(kernel, before="t1 = mib(20)") as let_go:  # 4
            panel.until(lambda tick: tick["cell"] == 4)
            panel.ask("refresh")
            beside = panel.heap(lambda heap: heap["during"] is not None)
            let_go()
        after = panel.heap(lambda heap: heap["heap"] > beside["heap"])

    assert (beside["during"], beside["cell"], after["during"], after["cell"]) == (4, 3, None, 4)


def test_what_fits_follows_another_notebook_on_the_same_device(notebook: Notebook, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bytes": 8 << 30, "context": 256 * MIB, "state": tmp_path / "state"}
    kernel, other = notebook(**settings), notebook(**settings)
    kernel.run("mine = mib(100)").ok()
    with panel_of(kernel) as panel:
        panel.heap(lambda heap: heap["heap"] > 0)
        before = panel.until(lambda tick: tick["devices"] and tick["devices"][0]["fits"])["devices"][0]["fits"]
        other.run("theirs = mib(1800)").ok()
        after = panel.until(lambda tick: tick["devices"][0]["fits"][0] < before[0] - 1700 * MIB)["devices"][0]["fits"]

    kernel.run(f"big = torch.empty({after[0]}, dtype=torch.uint8, device='cuda')").ok()
    kernel.run("del big; torch.cuda.empty_cache()").ok()
    kernel.run(f"torch.empty({after[1] + 4 * MIB}, dtype=torch.uint8, device='cuda')")
    assert "OutOfMemoryError" in kernel.value("type(__import__('sys').last_value).__name__")

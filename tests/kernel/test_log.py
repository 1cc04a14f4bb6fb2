"""`%nbguard log` in a real kernel: each cell is written, a file for Prometheus while a cell runs, and off is off."""

from __future__ import annotations

from pathlib import Path

from tests.kernels import Kernel

_RECORDS = "__import__('nbguard').frontend.notebook.session.session_of(get_ipython()).switches.history"
_ROWS = "import csv\nrows = [row for row in csv.DictReader(open('{path}')) if row['name'] == 'memory_allocated']"


def test_each_cell_is_a_row_until_it_is_off(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    kernel.run("%load_ext nbguard\nimport torch").ok()
    assert "the memory is not logged" in kernel.run("%nbguard log").ok().text
    begun = kernel.run(f"%nbguard log csv:{path}").ok()
    assert str(path) in begun.text
    kernel.run("x = torch.ones(256, 1024)").ok()
    kernel.run("del x").ok()
    assert "cells written so far" in kernel.run("%nbguard log -o state").ok().text
    ended = kernel.run("%nbguard log off").ok()
    assert "the memory is not logged" in ended.text
    kernel.run("y = torch.ones(256, 1024)").ok()

    kernel.run(_ROWS.format(path=path)).ok()
    levels = kernel.value("[float(row['value']) for row in rows]")
    assert levels[0] - levels[1] == 256 * 1024 * 4  # the cell that made the tensor, and the one that deleted it
    cells = kernel.value("[int(row['epoch']) for row in rows]")
    assert cells == sorted(cells)
    assert kernel.value("max(int(row['epoch']) for row in rows) < len(In) - 3")
    assert kernel.value("[t.name for t in __import__('threading').enumerate() if t.name == 'nbguard log']") == []


def test_a_file_for_prometheus_is_written_while_a_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "gpu.prom"
    kernel.run("%load_ext nbguard\nimport torch").ok()
    begun = kernel.run(f"%nbguard log prometheus:{path} --every 0.05").ok()
    assert "also written every 0.05 s" in begun.text
    kernel.run(f"""
import os, time
before = os.path.getmtime('{path}') if os.path.exists('{path}') else 0
limit = time.monotonic() + 60
while time.monotonic() < limit and not (os.path.exists('{path}') and os.path.getmtime('{path}') > before): time.sleep(0.01)
""").ok()
    assert kernel.value(f"os.path.getmtime('{path}') > before")
    assert kernel.value(f"'nbguard_' in open('{path}').read()")
    kernel.run("%unload_ext nbguard").ok()
    assert kernel.value("[t.name for t in __import__('threading').enumerate() if t.name == 'nbguard log']") == []


def test_another_log_takes_the_place_of_the_one_before(kernel: Kernel, tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    kernel.run("%load_ext nbguard\nimport torch").ok()
    kernel.run(f"%nbguard log csv:{first}").ok()
    kernel.run(f"%nbguard log csv:{second}").ok()
    kernel.run("x = torch.ones(256, 1024)").ok()

    kernel.run("%nbguard log off").ok()

    kernel.run(_ROWS.format(path=second)).ok()
    assert kernel.value("len(rows)") >= 1
    assert kernel.value(_RECORDS) is False


def test_a_log_that_cannot_be_opened_has_no_cells_recorded(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%load_ext nbguard\nimport torch").ok()
    assert "there is no folder" in str(kernel.run(f"%nbguard log csv:{tmp_path}/no/cells.csv").error)
    assert kernel.value(_RECORDS) is False


def test_mistakes_are_one_line_and_change_nothing(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%load_ext nbguard").ok()
    kernel.run(f"%nbguard log csv:{tmp_path}/cells.csv").ok()
    for line, words in (
        ("nowhere:x", "no log is called 'nowhere'"),
        ("csv", "a csv log needs a place to write to"),
        ("off csv:x", "off takes nothing else"),
        (f"csv:{tmp_path}/no/cells.csv", "there is no folder"),
        (f"prometheus:{tmp_path}/x.prom --every 0", "--every takes seconds above 0"),
    ):
        assert words in str(kernel.run(f"%nbguard log {line}").error)
    assert "cells.csv" in kernel.run("%nbguard log").ok().text


def test_a_live_log_that_fails_in_its_thread_is_said_once_and_the_others_go_on(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%load_ext nbguard\nimport torch").ok()
    kernel.run(f"%nbguard log prometheus:{tmp_path}/gpu.prom csv:{tmp_path}/cells.csv --every 0.02").ok()
    kernel.run("""
import threading, time
from nbguard.training.profiler.sinks import PrometheusSink as sink
def fails(*_): raise ZeroDivisionError("not ours")
before, sink.log = sink.log, fails
thread = next(each for each in threading.enumerate() if each.name == "nbguard log")
limit = time.monotonic() + 60
while thread.is_alive() and time.monotonic() < limit: time.sleep(0.01)
""").ok()
    said = kernel.run("x = 1").stdout + kernel.run("x = 2").stdout
    assert kernel.value("thread.is_alive()") is False
    state = kernel.run("%nbguard log").ok().text
    assert "ZeroDivisionError: not ours" in state
    assert "cells.csv" in state
    assert said.count("this log is off") <= 1
    kernel.run("sink.log = before").ok()
    kernel.run("%nbguard log off").ok()

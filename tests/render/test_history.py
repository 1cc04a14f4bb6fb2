"""The history and the lines under cells: golden text, columns that add up, a picture that stays small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nbguard.frontend.notebook.display import line_bundle
from nbguard.memory.cleanup.plan.plan import Action, Outcome, Plan, Request
from nbguard.memory.reports.cell_ledger import PROCESS, CellRecord, DeviceChange, History, Share, released_line
from nbguard.memory.reports.cell_ledger import cell_line as line
from nbguard.memory.reports.switches import Switches
from tests.render.test_render import _golden, _parsed

MiB = 1024**2


def history_text(history: History, limit: int = 12) -> str:
    return history.mimebundle(limit=limit)["text/plain"]


def history_html(history: History) -> str:
    return history.mimebundle()["text/html"]


def _afternoon() -> History:
    """Ten cells: a Learner, a fit, one that fails, memory that a widget took, a cleanup."""
    made = CellRecord(
        cell=3,
        raised=False,
        devices=(DeviceChange(device="cuda:0", before=0, after=90 * MiB, reserved_before=0, reserved=92 * MiB, peak=90 * MiB),),
        came=(Share("cuda:0", "learn", 90 * MiB, True),),
    )
    fit = CellRecord(
        cell=4,
        raised=False,
        devices=(
            DeviceChange(
                device="cuda:0",
                before=90 * MiB,
                after=270 * MiB + 512,
                reserved_before=92 * MiB,
                reserved=600 * MiB,
                peak=580 * MiB,
            ),
        ),
        came=(Share("cuda:0", "learn", 180 * MiB), Share("cuda:0", "loss", 512, True)),
    )
    idle = [
        CellRecord(
            cell=n,
            raised=False,
            devices=(
                DeviceChange(
                    device="cuda:0",
                    before=270 * MiB + 512,
                    after=270 * MiB + 512,
                    reserved_before=600 * MiB,
                    reserved=600 * MiB,
                    peak=None,
                    limit=580 * MiB,
                ),
            ),
        )
        for n in (5, 6)
    ]
    now = 270 * MiB + 512
    failed = CellRecord(
        cell=7,
        raised=True,
        devices=(
            DeviceChange(
                device="cuda:0",
                before=now + 8 * MiB,
                after=now + 72 * MiB,
                reserved_before=600 * MiB,
                reserved=600 * MiB,
                peak=None,
                limit=580 * MiB,
                between=8 * MiB,
            ),
        ),
        came=(Share("cuda:0", "clicks", 8 * MiB, True),),
        went=(),
        stale=(Share("cuda:0", "last error", 64 * MiB), Share("cuda:0", "Out[6]", 4 * MiB)),
        seconds=0.44,
    )
    clean = CellRecord(
        cell=8,
        raised=False,
        devices=(
            DeviceChange(
                device="cuda:0",
                before=now + 72 * MiB,
                after=now + 8 * MiB,
                reserved_before=600 * MiB,
                reserved=340 * MiB,
                peak=None,
                limit=580 * MiB,
            ),
        ),
        went=(Share("cuda:0", "last error", 64 * MiB),),
    )
    return History((made, fit, *idle, failed, clean))


def test_history(request: pytest.FixtureRequest) -> None:
    _golden("history.txt", history_text(_afternoon()), request)


def test_lines(request: pytest.FixtureRequest) -> None:
    found = [record for record in _afternoon().records if record.is_worth_a_line]
    slow = CellRecord(
        cell=9,
        raised=False,
        devices=(DeviceChange(device=PROCESS, before=700 * MiB, after=900 * MiB),),
        unseen="a scan takes 1.3 s here",
    )
    two = CellRecord(
        cell=10,
        raised=False,
        devices=(
            DeviceChange(device="cuda:0", before=0, after=MiB),
            DeviceChange(device="cuda:1", before=0, after=3 * MiB),
            DeviceChange(device="cuda:2", before=5, after=5),
        ),
    )

    _golden("cells.txt", "\n".join(map(line, [*found, slow, two])), request)


def test_each_device_has_its_own_holders() -> None:
    """What a cell did to one device is no word in the table of another; a line says it once, of all of them."""
    devices = (DeviceChange(device="cuda:0", before=0, after=2 * MiB), DeviceChange(device="cuda:1", before=0, after=3 * MiB))
    came = (Share("cuda:1", "net", 3 * MiB, True), Share("cuda:0", "net", 2 * MiB, True))
    stale = (Share("cuda:1", "last error", 7 * MiB),)
    made = CellRecord(cell=1, raised=False, devices=devices, came=came)
    failed = CellRecord(
        cell=2,
        raised=True,
        devices=(
            DeviceChange(device="cuda:0", before=2 * MiB, after=2 * MiB),
            DeviceChange(device="cuda:1", before=3 * MiB, after=10 * MiB),
        ),
        came=(),
        went=(),
        stale=stale,
    )

    first, second = history_text(History((made, failed))).split("\n\ncuda:1  ")

    assert "+ net 2 MiB" in first
    assert "last error" not in first
    assert "+ net 3 MiB" in second
    assert "failed · stale: last error 7 MiB" in second
    assert line(made).endswith("new: net 5 MiB")
    assert History((made, failed)).only("0").records[0].came == came[1:]


def _changes(text: str) -> list[float]:
    """Return the figures of the column `change`: the first of each row but the last."""
    rows = [row for row in text.splitlines() if re.search(r"\[\d+\]  |earlier|outside", row)]
    return [float(re.search(r"([+−]?)([\d.]+) MiB", row)[0].split()[0].replace("−", "-")) for row in rows if "MiB" in row][1:]


@pytest.mark.parametrize("limit", [1, 2, 12])
def test_the_changes_re_add_to_what_is_allocated_now(limit: int) -> None:
    text = history_text(_afternoon(), limit)

    figures = _changes(text)

    assert len(figures) == {1: 3, 2: 4, 12: 5}[limit]
    assert sum(figures) == pytest.approx(278, abs=0.5)  # the last of three digits
    assert text.splitlines()[-1].split()[:3] == ["now", "278", "MiB"]


def test_html_says_the_same_as_text() -> None:
    words = " ".join(_parsed(history_html(_afternoon())).words)

    figures = re.findall(r"[\d.]+ MiB", history_text(_afternoon()))
    assert figures
    assert all(figure in words for figure in figures)


def test_the_picture_tells_what_it_is_to_who_cannot_see_it() -> None:
    html = history_html(_afternoon())

    assert re.search(r'<svg role="img" aria-label="Memory on cuda:0 after each cell, In\[3\] to In\[8\];', html)
    assert "http" not in html
    assert "<script" not in html


def _bars(html: str) -> list[tuple[float, float]]:
    return [
        (float(y), float(height))
        for y, height in re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', html)
    ]


def test_bars_are_as_high_as_the_memory() -> None:
    bars = _bars(history_html(_afternoon()))

    heights = [height for _, height in bars]
    assert len(heights) == 6
    assert heights[1] / heights[0] == pytest.approx(270 / 90, rel=0.02)
    assert heights[4] == max(heights)
    assert len({round(y + height) for y, height in bars}) == 1


def test_many_cells_make_few_bars_and_the_highest_is_among_them() -> None:
    steps = [DeviceChange(device="cpu", before=n * MiB, after=(n + 1) * MiB if n != 250 else 2000 * MiB) for n in range(500)]
    history = History(tuple(CellRecord(cell=n + 1, raised=n == 77, devices=(step,)) for n, step in enumerate(steps)))

    html = history_html(history)

    heights = [height for _, height in _bars(html)]
    assert len(heights) <= 120
    assert "each bar: the highest of 5 cells" in html
    assert heights.index(max(heights)) == 50
    assert html.count("×") == 2  # one mark, and the key
    assert len(html) < 60_000
    assert len(history_text(history).splitlines()) < 25


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=y>'])
def test_every_name_is_escaped(name: str) -> None:
    record = CellRecord(
        cell=1,
        raised=False,
        devices=(DeviceChange(device=name, before=0, after=5 * MiB),),
        came=(Share(name, name, 5 * MiB, True),),
        stale=(Share(name, name, 9 * MiB),),
    )

    for html in (history_html(History((record,))), line_bundle(line(record))["text/html"]):
        assert not _parsed(html).tags & {"script", "img"}


def test_what_was_released_is_what_the_error_held() -> None:
    error, rest = (
        Action(kind="error", subject="last error", participle="released", nbytes=30 * MiB),
        Action(kind="collect", subject="cycles", participle="collected", nbytes=4 * MiB),
    )
    plan = Plan(request=Request(only_error=True), actions=(error, rest), promised=34 * MiB)
    done = Outcome(plan=plan, done=plan.actions, undone=(), realised=34 * MiB, extra=0, before=50 * MiB, after=16 * MiB)
    short = Outcome(plan=plan, done=plan.actions, undone=(), realised=20 * MiB, extra=0, before=50 * MiB, after=30 * MiB)

    assert released_line(done, 7) == (
        "released 30 MiB that the error in In[7] held (%tb, %debug still work), and 4 MiB of unreachable cycles"
    )
    assert released_line(short, 7).startswith("released 20 MiB of 34 MiB promised")


def test_switches_and_history_are_results_like_others() -> None:
    switches = Switches(oom_card=True, history=True, cells=False, auto_clean_errors=True, recorded=1)

    text = switches.mimebundle()["text/plain"]

    assert re.search(r"out-of-memory card +on$", text, re.MULTILINE)
    assert re.search(r"history of cells +on +1 cell recorded", text)
    assert re.search(r"line after a cell +off +%gpumem cells on", text)
    assert re.search(r"sidebar +off +%nbguard on$", text, re.MULTILINE)
    assert all(word in switches.mimebundle()["text/html"] for word in ("history of cells", "1 cell recorded"))
    assert switches.json_bundle()["application/json"]["kind"] == "switches"
    assert _afternoon().json_bundle()["application/json"]["records"][0]["devices"][0]["after"] == 90 * MiB


def test_the_switches_say_who_looks_at_the_sidebar() -> None:
    def said(**facts: Any) -> str:
        switches = Switches(oom_card=True, history=False, cells=False, auto_clean_errors=False, sidebar=True, **facts)
        return next(line.strip() for line in switches.mimebundle()["text/plain"].splitlines() if "sidebar" in line)

    assert re.fullmatch("sidebar +on +no view is open: nothing runs", said())
    assert said(views=1, rate=4.0).endswith("1 view open, updated 4 times a second")
    assert said(views=2, rate=0.5, jobs=3).endswith("2 views open, updated 0.5 times a second · 3 requests waiting")


def test_the_switches_say_what_walks_the_heap() -> None:
    def said(**facts: Any) -> str:
        switches = Switches(oom_card=True, history=False, cells=False, auto_clean_errors=False, **facts)
        return switches.mimebundle()["text/plain"].splitlines()[-1].strip()

    assert re.fullmatch("heap walk +C", said(compiled_walk=True))
    assert re.fullmatch("heap walk +pure Python +because NBGUARD_PURE is set", said(why_pure="NBGUARD_PURE is set"))


def test_a_history_without_memory_says_so() -> None:
    assert "no cell has used memory" in history_text(History())
    assert "no cell has used memory" in history_html(History())


def test_golden_files_are_all_used() -> None:
    here = Path(__file__).parent
    used = "".join(path.read_text(encoding="utf-8") for path in here.parent.rglob("test_*.py"))

    assert all(f'"{path.name}"' in used for path in (here.parent / "golden").glob("*.txt"))

"""An hour of a newcomer with the panel, in one notebook: each step with what it is expected to show.

In CI in JupyterLab, light, at the width that it gives a panel; thoroughly in both hosts, three themes, two widths, at 200 %.
"""

from __future__ import annotations

import itertools
import re
import sys

import pytest
from playwright.sync_api import expect

from tests.kernels import wait_until
from tests.thorough import THOROUGH
from tests.ui.axe import view_findings
from tests.ui.cells import LOAD
from tests.ui.conftest import Desk
from tests.ui.looks import THEMES
from tests.ui.pages import App, Tab
from tests.ui.servers import Server

_APPS: tuple[App, ...] = ("lab", "notebook")
_WAYS = [*itertools.product(_APPS, THEMES, (245, 500), (1,)), *((app, THEMES[0], 245, 2) for app in _APPS)]
_WHOLE = """view => [...view.querySelectorAll('.nbguard-status, .nbguard-figure, .nbguard-links')]
  .filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"""
"""Texts that must never be cut, and are."""
_SEEN = "one => one.checkVisibility({ opacityProperty: true, visibilityProperty: true })"
CELLS = [
    "import torch; from torch import nn",
    "big, small = torch.ones(16 << 18), torch.ones(4 << 18)",
    "m = nn.Linear(1 << 10, 1 << 10); m",
    "del m",
    "import nbguard; nbguard.Sidebar()",
    "%gpumem simulate 1GiB",
    "cache = [torch.empty(1 << 26) for _ in range(3)]",
    "batch = torch.empty(1 << 27)",
    "%reset_gpu cache",
]


def expect_fine(tab: Tab, step: str) -> None:
    """Expect that axe finds nothing and that nothing which matters is cut."""
    assert view_findings(tab.page) == [], step
    assert tab.page.evaluate(_WHOLE, tab.panel.element_handle()) == [], step


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.parametrize(("app", "theme", "width", "zoom"), _WAYS if THOROUGH else _WAYS[:1])
def test_story(desk: Desk, server: Server, app: App, theme: str, width: int, zoom: int) -> None:
    other = desk.notebook(server, [])
    other.kernel.run(f"{LOAD}\nimport torch; theirs = torch.ones(8 << 18)").ok()
    notebook = desk.notebook(server, CELLS)
    notebook.kernel.run(LOAD).ok()
    tab = desk.open(notebook, app)
    tab.show_panel()
    tab.set_width(width)  # before the page is half as wide: a wide panel would cover the cells
    tab.page.set_viewport_size({"width": 1280 // zoom, "height": 900 // zoom})
    tab.set_theme(theme)
    for number in range(3):
        tab.run(number)
    tab.set_width(width)
    _rows_without_pointing(tab)
    _by_keyboard(tab)
    _several_at_once(tab)
    _what_is_over(tab)
    _out_of_memory(tab)
    if app == "lab":
        expect(tab.panel.locator(".nbguard-neighbours")).to_contain_text(f"{other.name} ")
        tab.button(f"go to {other.name}").click()
        expect(tab.panel.get_by_role("heading", level=2)).to_have_text(other.name)
        tab.show(notebook)
    _restart(tab)


def _rows_without_pointing(tab: Tab) -> None:
    """What can be done about a row is seen without pointing at it; no text is about a GPU that is not there."""
    for name in ("why big", "release… big", "park big"):
        expect(tab.button(name)).to_be_visible()
        assert tab.button(name).evaluate(_SEEN), name
    expect(tab.panel.locator(".nbguard-bar")).to_be_hidden()
    expect(tab.button("Empty cache")).to_be_hidden()
    if tab.app == "lab":
        item = tab.page.locator(".nbguard-status-item button")
        expect(item).to_have_text(re.compile(r"^host memory [\d.]+ [MG]iB$"))
        item.click()
        expect(tab.panel).to_be_hidden()
        item.click()
        expect(tab.panel).to_be_visible()
        tab.wait_for_ticks()
    expect_fine(tab, "rows")


_LATE_FRAMES = """() => {
  window.soon = window.requestAnimationFrame;
  window.requestAnimationFrame = done => setTimeout(() => done(performance.now()), 1500);
}"""
"""Frames come after the kernel's answer, as on a busy machine."""


def _by_keyboard(tab: Tab) -> None:
    tab.button("why big").focus()
    tab.page.keyboard.press("ArrowDown")
    assert tab.focused().startswith("why ")
    assert tab.focused() != "why big"
    tab.page.keyboard.press("ArrowUp")
    assert tab.focused() == "why big"
    tab.page.keyboard.press("ArrowRight")
    assert tab.focused() == "release… big"
    tab.run(3)  # del m
    expect(tab.button(re.compile("^Clean stale · "))).to_be_visible()
    tab.page.evaluate(_LATE_FRAMES)
    tab.execute("nbguard:clean-stale")
    plan = tab.part("Clean stale: the plan")
    expect(plan).to_be_focused()
    tab.page.evaluate("() => { window.requestAnimationFrame = soon; }")
    expect(plan).to_contain_text("Nothing has been done yet.")
    tab.page.keyboard.press("Tab")
    expect(plan.get_by_role("checkbox").first).to_be_focused()
    expect_fine(tab, "plan")
    tab.page.keyboard.press("Escape")
    expect(plan).to_be_hidden()


def _several_at_once(tab: Tab) -> None:
    tab.panel.get_by_label("select big").check()
    tab.panel.get_by_label("select small").check()
    expect(tab.panel).to_contain_text("2 selected · 20 MiB")
    tab.button("release… what is selected").click()
    plan = tab.part(re.compile("^Release .*: the plan$"))
    plan.get_by_role("checkbox", name=re.compile("^small")).uncheck()
    expect(plan).to_contain_text("left out")
    tab.button("Release big").click()
    expect(tab.heading("Just done")).to_be_visible()
    expect_fine(tab, "done")
    assert tab.notebook.kernel.value("['big' in globals(), 'small' in globals()]") == [False, True]
    expect(tab.button("why big")).to_be_hidden()
    expect(tab.button("why small")).to_be_visible()


def _what_is_over(tab: Tab) -> None:
    """A finding says its cell, goes when it is dismissed, also from a page that is loaded again, and with what it is about."""
    findings = tab.part("Findings")
    expect(findings).to_contain_text("Out[")
    expect(findings.get_by_role("button", name=re.compile(r"^go to In\[\d+\]$"))).to_be_visible()
    expect_fine(tab, "findings")
    tab.button(re.compile("^Dismiss: m is deleted|^Dismiss: m was deleted")).click()
    expect(findings).to_be_hidden()
    tab.page.wait_for_timeout(500)
    tab.reload()
    tab.show_panel()
    expect(tab.button("why small")).to_be_visible()
    expect(tab.heading("Findings")).to_be_hidden()
    for number in (2, 3):
        tab.run(number)
    expect(findings).to_be_visible()
    tab.button(re.compile("^Clean stale · ")).click()
    tab.button(re.compile("^Free ")).click()
    expect(tab.heading("Just done")).to_be_visible()
    expect(findings).to_be_hidden()


def _out_of_memory(tab: Tab) -> None:
    """The card in the panel has the same remedies as the one under the cell, and goes with the lack of memory."""
    for number in (5, 6, 7):
        tab.run(number)
    card = tab.part("Out of memory")
    expect(card).to_contain_text("%reset_gpu cache")
    below = tab.cell(7).locator(".jp-OutputArea").inner_text()
    assert {code.inner_text() for code in card.locator("code.nbguard-source").all()} <= set(
        re.findall(r"%reset_gpu[\w ]*\w", below)
    )
    expect_fine(tab, "card")
    tab.run(8)
    if sys.version_info < (3, 11):  # which does not tell that nothing comes after the line that failed: it may be enough
        tab.run(7)
    expect(card).to_be_hidden()


def _restart(tab: Tab) -> None:
    """It is shown as a restart, with nothing of before; a widget in the notebook makes no error."""
    tab.run(4)
    expect(tab.cell(4).locator(".nbguard-view")).to_be_visible()
    seen: list[str] = []
    tab.page.evaluate("() => { window.restarted = jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }")

    def is_shown() -> bool:
        seen.append(tab.panel.inner_text())
        return "not loaded" in seen[-1]

    wait_until(is_shown, "the restart to be shown")
    assert not any("native code" in text or "not responding" in text for text in seen), seen
    expect(tab.panel.locator("tbody").first).to_be_hidden()
    expect(tab.cell(4).locator(".nbguard-view")).to_contain_text("The kernel was restarted.")
    expect_fine(tab, "restarted")

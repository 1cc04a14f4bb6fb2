"""The panel for everybody: by keyboard alone, with nothing found by axe, with names that would be more than text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.thorough import THOROUGH, half_in_ci, left_out_by_ci
from tests.ui.axe import view_findings
from tests.ui.cells import ALIVE, LOAD
from tests.ui.conftest import Desk
from tests.ui.contrast import faint, graphics
from tests.ui.looks import THEMES, WIDTHS
from tests.ui.pages import App, Tab
from tests.ui.servers import Server
from tests.ui.test_clean import after_the_accidents

HOSTILE = {
    "markup": "<img src=x onerror=\"document.title='harmed'\">",
    "script": "</script><script>document.title='harmed'</script>",
    "backwards": "\u202eevil\u202c שלום",
    "emoji": "👩🏽‍🚀🔥",
    "long": "n" * 10_000,
}


_OUTSIDE = """view => [view, ...view.querySelectorAll('.nbguard-body, .nbguard-dock')]
  .filter(one => one.scrollWidth > one.clientWidth).map(one => one.className)"""
"""Classes of the parts of the view in which something reaches beyond the edge."""
_MENU_IS_IN_LINE = """view => {
  const [span, menu] = ['.nbguard-chart-span', '.nbguard-chart-words .nbguard-menu'].map(name => view.querySelector(name));
  const [a, b] = [span, menu].map(one => one.getBoundingClientRect());
  return a.top < b.bottom && b.top < a.bottom;
}"""


HOSTS: list[App] = ["lab", "notebook"]


@pytest.mark.slow
@pytest.mark.parametrize("app", HOSTS if THOROUGH else HOSTS[:1])
def test_each_state_by_keyboard_and_by_axe(desk: Desk, server: Server, app: App) -> None:
    """By keyboard alone from one state of the panel to the next; in each of them, and in each theme, axe finds nothing."""
    tab = after_the_accidents(desk, server, app=app)
    tab.wait_for_ticks(2)
    expect_each_button_to_be_reached(tab)
    for theme in in_each_theme(tab):
        for width in WIDTHS:
            expect_nothing(tab, f"holders, {theme}", width)
            assert tab.page.evaluate(_MENU_IS_IN_LINE, tab.panel.element_handle()), (theme, width)
            drawn = graphics(tab.page)
            assert len(drawn) >= 3  # the key of the device's part, the dot and the line
            assert faint(drawn) == [], f"{theme}, {width} px"
    tab.button("why losses").click()
    expect(tab.panel).to_contain_text("%reset_gpu losses", use_inner_text=True)
    for theme in in_each_theme(tab):
        expect_nothing(tab, f"why, {theme}")

    plan, done = tab.heading("Clean stale: the plan"), tab.heading("Just done")
    press(tab, re.compile("^Clean stale"))
    expect(plan).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(plan).to_be_hidden()
    assert tab.focused().startswith("Clean stale"), "the focus is lost"
    tab.page.keyboard.press("Enter")
    expect(plan).to_be_visible()
    for theme in in_each_theme(tab):
        expect_nothing(tab, f"plan, {theme}")

    press(tab, re.compile("^Free "))
    expect(done).to_be_visible()
    assert tab.notebook.kernel.value(ALIVE) == [0, 0]
    for theme in in_each_theme(tab):
        expect_nothing(tab, f"outcome, {theme}")

    workers = tab.panel.get_by_role("menuitem", name="Stop workers")
    press(tab, re.compile("^More actions"))
    expect(workers).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(workers).to_be_hidden()

    server.ask("POST", f"api/kernels/{tab.notebook.id}/restart")
    expect(tab.panel).to_contain_text("not loaded", use_inner_text=True)
    for theme in in_each_theme(tab):
        expect_nothing(tab, f"not loaded, {theme}")


def in_each_theme(tab: Tab) -> Iterator[str]:
    """Show the tab in one theme after the other; in CI in the first and the last."""
    for theme in half_in_ci(THEMES):
        tab.set_theme(theme)
        yield theme


def expect_nothing(tab: Tab, state: str, *widths: int) -> None:
    """Expect that axe finds nothing and nothing is cut off: at these widths; without: at its own, in thorough runs at all."""
    for width in widths or (WIDTHS if THOROUGH else ()):
        tab.set_width(width, ticks=0)
        assert tab.page.evaluate(_OUTSIDE, tab.panel.element_handle()) == [], f"{state}, {width} px"
        assert view_findings(tab.page) == [], f"{state}, {width} px"
    if not widths:
        assert view_findings(tab.page) == [], state


@left_out_by_ci
def test_what_ticks_is_not_announced(desk: Desk, server: Server) -> None:
    """What stands in a live region stays as it is while nothing happens; what a click gave is in one."""
    tab = after_the_accidents(desk, server)
    live = ":is([aria-live=polite], [aria-live=assertive], [role=status], [role=alert])"
    spoken = f"() => [...document.querySelectorAll('.nbguard-view {live}')].map(one => one.textContent)"
    before = tab.page.evaluate(spoken)
    tab.wait_for_ticks(6)
    assert tab.page.evaluate(spoken) == before
    tab.button(re.compile("^Clean stale")).click()
    tab.button(re.compile("^Free ")).click()
    expect(tab.heading("Just done")).to_be_visible()
    assert any("reed" in text for text in tab.page.evaluate(spoken)), "the outcome is not announced"


def expect_each_button_to_be_reached(tab: Tab) -> None:
    """Expect Tab to go through the panel, and to stop at one row of the list, in which arrow keys go from row to row."""
    reached = [*walk(tab), *rows(tab)]
    buttons = {name for name in tab.names() if name}
    assert buttons <= set(reached), buttons - set(reached)


def walk(tab: Tab) -> list[str]:
    """Return the names of what Tab reaches in the panel, from its start to its end."""
    tab.page.evaluate("() => { const view = document.querySelector('.nbguard-view'); view.tabIndex = -1; view.focus(); }")
    names = []
    for _ in range(200):
        tab.page.keyboard.press("Tab")
        if not tab.focused():
            return names
        names.append(tab.focused())
    raise AssertionError(f"Tab does not leave the panel: {names[-5:]}")


def rows(tab: Tab) -> list[str]:
    """Return the names of what arrow keys reach in the list of holders, row by row."""
    names: list[str] = []
    focus(tab, re.compile("^Frees"))
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Home")
    for _ in range(tab.panel.locator("tbody").count()):
        last = ""
        while tab.focused() != last:
            last = tab.focused()
            names.append(last)
            tab.page.keyboard.press("ArrowRight")
        tab.page.keyboard.press("ArrowDown")
        last = ""
        while tab.focused() != last:  # to the row's first
            last = tab.focused()
            tab.page.keyboard.press("ArrowLeft")
    return names


def focus(tab: Tab, name: re.Pattern[str]) -> None:
    """Press Tab until a button of this name has the focus."""
    for _ in range(200):
        if name.search(tab.focused()):
            return
        tab.page.keyboard.press("Tab")
        if not tab.focused():
            tab.page.evaluate("() => document.querySelector('.nbguard-view').focus()")
    raise AssertionError(f"Tab does not reach {name.pattern}")


def press(tab: Tab, name: re.Pattern[str]) -> None:
    """Press a button by keyboard."""
    focus(tab, name)
    tab.page.keyboard.press("Enter")


@pytest.mark.slow
def test_hostile_names(desk: Desk, server: Server) -> None:
    notebook = desk.notebook(server, [])
    notebook.kernel.run(LOAD).ok()
    notebook.kernel.run(f"import torch; held = {{name: torch.ones(1 << 20) for name in {list(HOSTILE.values())!r}}}").ok()
    notebook.kernel.run("\n".join(f"globals()[{name!r}] = held.pop({name!r})" for name in HOSTILE.values())).ok()
    tab = desk.open(notebook)
    tab.wait_for_ticks(2)
    for name in HOSTILE.values():
        expect(tab.panel).to_contain_text(name[:40], use_inner_text=True)
    assert tab.page.title() != "harmed"
    assert tab.panel.locator("img, script").count() == 0
    assert tab.page.evaluate(
        "() => document.querySelector('.nbguard-view').scrollWidth <= document.querySelector('.nbguard-view').clientWidth"
    )

"""The view on a page of its own: all scenes, by axe; more than a notebook has, drawn fast, in a page that does not grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, CDPSession, Page, expect

from tests.ui.axe import view_findings
from tests.ui.contrast import faint, graphics
from tests.ui.servers import ROOT

DATA = ROOT / "tests" / "data" / "sidebar"
VIEW = ROOT / "nbguard" / "frontend" / "notebook" / "static"

DRAWN_MS = 100
MESSAGE_BYTES = 64_000
TEN_MINUTES = 2_400
"""Ticks, four per second."""
FULL = 700
"""Ticks, a second apart, after which the line has as many points as its span of ten minutes can have."""
GROWTH = 0.25
"""How much larger, as a share, the page's heap may be afterwards: what is compiled and cached meanwhile is in it."""

_HOST = Path(__file__).with_name("host.js").read_text()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """An empty page with the view in it; `host` feeds it."""
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content("<!doctype html><title>view</title><main style='width: 320px'></main>")
    page.add_style_tag(content=(VIEW / "widget.css").read_text())
    page.evaluate(_HOST)
    page.evaluate("code => host.show(code)", (VIEW / "widget.js").read_text())
    yield page
    page.close()
    assert errors == []


def fixture(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def feed(page: Page, state: dict[str, Any]) -> float:
    """Give the view a heap and a tick, and return the milliseconds until they were painted."""
    found: float = page.evaluate("state => host.feed(state)", state)
    return found


@pytest.mark.parametrize("scene", ["idle", "stale", "training", "parked", "oom", "hostile"])
def test_scene(page: Page, scene: str) -> None:
    feed(page, fixture(scene))
    assert view_findings(page) == []
    assert page.title() == "view", "a name has become code"
    assert page.locator(".nbguard-view").locator("img, script, iframe").count() == 0
    for room in (240, 320, 600):
        assert width(page, room) <= room


def test_a_silent_kernel_fits_into_a_narrow_panel(page: Page) -> None:
    feed(page, fixture("training"))
    expect(page.locator(".nbguard-view")).to_contain_text("kernel not responding")
    assert view_findings(page) == []
    assert width(page, 240) <= 240


HIGH_CONTRAST = "--jp-layout-color1: #000; --jp-ui-font-color1: #fff; --jp-ui-font-color2: #fff; --jp-border-color2: #fff;"


@pytest.mark.parametrize("theme", ["light", "dark", "high contrast"])
def test_graphics_stand_out_from_the_ground(page: Page, theme: str) -> None:
    """At least 3:1 for each part of a picture (WCAG 1.4.11); what is free in some way has a pattern besides its colour."""
    page.emulate_media(color_scheme="light" if theme == "light" else "dark")
    if theme == "high contrast":
        page.add_style_tag(content=f":root {{ {HIGH_CONTRAST} }}")
    feed(page, fixture("training"))
    drawn = graphics(page)
    assert len(drawn) > 15
    assert faint(drawn) == []
    patterned = {name for name, _, has_pattern in drawn if has_pattern}
    assert patterned >= {"nbguard-c-releasable", "nbguard-c-stranded"}
    assert view_findings(page) == []


def width(page: Page, room: int) -> int:
    """Return how wide, in pixels, the view is drawn where it has so much room."""
    found: int = page.evaluate(
        "room => { const main = document.querySelector('main'); main.style.width = `${room}px`;"
        " return Math.max(main.scrollWidth, ...[...main.children].map(one => one.scrollWidth)); }",
        room,
    )
    return found


_CUT = """() => [...document.querySelectorAll('.nbguard-two-ends > span:first-child')]
  .filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth).map(one => one.parentElement.textContent)"""


@pytest.mark.parametrize("scene", ["stale", "training"])
def test_a_name_is_cut_only_where_there_is_no_room(page: Page, scene: str) -> None:
    feed(page, fixture(scene))
    for fold in page.locator(".nbguard-fold:visible").all():
        fold.click()
    expect(page.locator(".nbguard-part:visible").first).to_be_visible()
    width(page, 800)
    assert page.evaluate(_CUT) == []


def test_a_thousand_holders_and_two_thousand_segments(page: Page) -> None:
    state = fixture("many")
    assert sum(len(json.dumps(state[part])) for part in ("tick", "heap")) < MESSAGE_BYTES
    times = [feed(page, state) for _ in range(5)]
    assert page.locator(".nbguard-view").get_attribute("data-tick") == str(state["tick"]["n"] + 4)
    assert min(times[1:]) < DRAWN_MS, times


@pytest.mark.slow
def test_ten_minutes_of_ticks(page: Page) -> None:
    state = fixture("many")
    page.evaluate("([state, ticks]) => host.run(state, ticks)", [state, FULL])
    cdp = page.context.new_cdp_session(page)
    before = in_use(cdp)
    page.evaluate("([state, ticks]) => host.run(state, ticks)", [state, TEN_MINUTES])
    after = in_use(cdp)
    assert after["nodes"] <= before["nodes"] * (1 + GROWTH), (before, after)
    assert after["bytes"] <= before["bytes"] * (1 + GROWTH), (before, after)


def in_use(cdp: CDPSession) -> dict[str, float]:
    """Return what the page holds after a collection: bytes of JavaScript, and nodes of the document."""
    cdp.send("Performance.enable")
    cdp.send("HeapProfiler.collectGarbage")
    metrics = {one["name"]: one["value"] for one in cdp.send("Performance.getMetrics")["metrics"]}
    return {"bytes": metrics["JSHeapUsedSize"], "nodes": metrics["Nodes"]}

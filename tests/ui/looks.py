"""Where and how a notebook is shown: in JupyterLab or Notebook 7, in which theme, with a panel how wide.

What a test asks does not depend on it: it runs in JupyterLab as that is by default, and those marked `both_hosts` run in
Notebook 7, too. With NBGUARD_THOROUGH=1 each test runs in both, in a look of its own, so that together they have all; with
NBGUARD_LOOK=1 besides, each has the next look, and so on: six runs, with 0 to 5, show every test in each theme and width.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.thorough import THOROUGH, left_out_by_ci
from tests.ui.pages import App

THEMES = ("JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast")
WIDTHS = (245, 700)
"""Pixels: what JupyterLab gives a panel, and what a user who looks closely does."""

lab_only = pytest.mark.lab_only
"""For what Notebook 7 does not have: several notebooks in a page, a status bar."""
both_hosts = pytest.mark.both_hosts


def hosts(in_ci: App) -> pytest.MarkDecorator:
    """Run a test, which takes its `app`, in both hosts; in CI, which shares the tests among the two, in one of them."""
    apps: tuple[App, ...] = ("lab", "notebook")
    marked = [pytest.param(app, marks=() if app == in_ci else left_out_by_ci) for app in apps]
    return pytest.mark.parametrize("app", marked)


@dataclass(frozen=True)
class Look:
    """Where and how a test shows its notebooks, unless it says otherwise."""

    app: App = "lab"
    theme: str = THEMES[0]
    width: int = WIDTHS[0]

    def __str__(self) -> str:
        """Return it as the id of a test."""
        return f"{self.app} {self.theme.removeprefix('JupyterLab ')} {self.width}"


_LOOKS = [(theme, width) for theme in THEMES for width in WIDTHS]
_TURN = int(os.environ.get("NBGUARD_LOOK", "0"))


def looks_of(test: str, *, in_notebook: bool) -> Sequence[Look]:
    """Return the looks of a test by its name: always the same, and in Notebook 7 another one than in JupyterLab."""
    first = (zlib.crc32(test.encode()) + _TURN) % len(_LOOKS)
    looks = [Look("lab", *_LOOKS[first]) if THOROUGH else Look()]
    return [*looks, Look("notebook", *_LOOKS[(first + 3) % len(_LOOKS)])] if in_notebook else looks


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give the test its looks, if it opens notebooks and does not say itself where."""
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "look" in metafunc.fixturenames:
        is_asked = THOROUGH or "both_hosts" in marks
        in_notebook = is_asked and "lab_only" not in marks and "app" not in metafunc.fixturenames
        metafunc.parametrize("look", looks_of(metafunc.definition.name, in_notebook=in_notebook), indirect=True, ids=str)

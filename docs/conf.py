"""Sphinx makes the site of these pages: `make docs` writes it into build/site. Nothing is fetched to build or to read it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "site"))

import nbguard

project = "nbguard"
author = "The nbguard founders"
release = version = nbguard.__version__
extensions = ["myst_parser", "sphinx_copybutton", "markup"]
exclude_patterns = ["site"]
nitpicky = False
suppress_warnings = ["myst.header"]
"""A page of decisions begins below its first heading."""

# --- pages --------------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre"

# --- looks --------------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"nbguard {version}"
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

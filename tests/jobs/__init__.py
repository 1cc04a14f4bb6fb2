"""Processes without a notebook: `nbguard run`, `nbguard.install()`, and reports of ranks."""

"""Processes without a notebook, scripts, ranks and tests, that end by running out of memory."""

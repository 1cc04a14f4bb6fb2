"""Changes that may save memory in a fit, each tried in a trace of its own by the lines that make it."""

"""Ranks of a distributed fit, with exchange of results, signs of life, the watchdog."""

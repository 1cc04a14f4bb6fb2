"""Ranks of a distributed fit: exchange of results, signs of life, the watchdog."""

"""Checks, findings and fixes: whether a run repeats, whether its model exports, whether this machine is set up for it."""

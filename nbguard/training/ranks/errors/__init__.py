"""Errors of ranks, in words, and brought home from a launch that failed."""

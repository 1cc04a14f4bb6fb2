"""The profiler of fits."""

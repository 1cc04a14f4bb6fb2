"""The profiler of fits: what is put around a fit while it runs. What is made of the log is in `nbguard.core.fit`."""

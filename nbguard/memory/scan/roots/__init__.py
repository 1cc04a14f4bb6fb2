"""The roots of the walk: the notebook's names, its output history, running frames, the last error, registries."""

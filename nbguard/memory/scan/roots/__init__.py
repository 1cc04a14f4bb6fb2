"""The roots of the walk, such as the notebook's names, its output history, running frames, the last error, registries."""

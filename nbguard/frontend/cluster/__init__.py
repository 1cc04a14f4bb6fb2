"""Several kernels at once, the engines of an ipyparallel cluster: their memory in one table, and their cleanups by one plan."""

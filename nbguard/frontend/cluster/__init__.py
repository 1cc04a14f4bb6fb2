"""Several kernels at once, the engines of an ipyparallel cluster, with one table of their memory and one plan."""

"""Diagnosis of the calls of a job's ranks, from facts to findings. Pure."""

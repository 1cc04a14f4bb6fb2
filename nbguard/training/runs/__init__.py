"""The record of a run, collected without changing a bit, and the differences of two records."""

"""The ranks of a distributed fit compared."""

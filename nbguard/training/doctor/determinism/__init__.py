"""Determinism, tried: one step is run several times from one state, on copies, and its bits are compared."""

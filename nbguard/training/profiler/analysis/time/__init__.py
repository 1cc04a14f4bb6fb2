"""A fit's time: the log of phases, batches, steady state, GPU events."""

"""A fit's time, with the log of phases, batches, steady state, GPU events."""

"""Listeners that act after a cell: the out-of-memory card, automatic cleaning, the simulated device."""

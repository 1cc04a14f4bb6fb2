"""Listeners that act after a cell, such as the out-of-memory card, automatic cleaning, the simulated device."""

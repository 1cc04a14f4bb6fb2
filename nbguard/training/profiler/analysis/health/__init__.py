"""A fit's health: non-finite values, mixed precision, optimizers, settings, synchronisations."""

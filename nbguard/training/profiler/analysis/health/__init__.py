"""A fit's health, with non-finite values, mixed precision, optimizers, settings, synchronisations."""

"""Instruments for mixed precision, optimizers, settings, synchronisations and the GPU."""

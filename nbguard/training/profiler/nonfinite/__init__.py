"""Instruments for NaN and infinite values."""

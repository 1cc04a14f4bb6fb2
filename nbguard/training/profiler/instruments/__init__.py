"""Instruments: each watches one aspect of a fit while it runs."""

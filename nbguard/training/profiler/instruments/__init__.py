"""Instruments, each watching one aspect of a fit while it runs."""

"""Instruments, each of which watches one aspect of a fit while it runs."""

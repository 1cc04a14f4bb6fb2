"""Instruments for DataLoaders and their workers."""

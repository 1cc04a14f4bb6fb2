"""Leaks and slow lines of scripts and notebooks, found in the source before it runs. Pure: nothing of it is executed."""

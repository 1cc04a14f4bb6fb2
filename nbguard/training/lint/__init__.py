"""Leaks and slow lines of scripts and notebooks, found in the source before it runs. Pure. Nothing of it is executed."""

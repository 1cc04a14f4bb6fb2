"""Fits found in source code that has not run: in a cell, in a script."""

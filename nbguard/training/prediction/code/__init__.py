"""Fits found in source code that has not run, in a cell or in a script."""

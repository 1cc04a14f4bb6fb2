"""The report of a profile as blocks."""

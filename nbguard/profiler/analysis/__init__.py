"""The analysis of a profile: pure functions from what was recorded to a `FitReport`."""

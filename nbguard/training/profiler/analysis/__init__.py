"""The analysis of a profile: pure functions from `FitObservations` to a `FitReport`."""

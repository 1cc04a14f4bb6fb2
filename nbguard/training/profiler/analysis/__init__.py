"""The analysis of a profile, by pure functions from `FitObservations` to a `FitReport`."""

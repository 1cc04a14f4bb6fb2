"""What a profile of a fit says: pure, from the log that `nbguard.fit` has recorded."""

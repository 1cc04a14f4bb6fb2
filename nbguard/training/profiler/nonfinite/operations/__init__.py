"""The operation that made a value which is not finite: recorded, computed again, described."""
